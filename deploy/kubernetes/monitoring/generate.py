"""Make this folder's objects from the alert rules and dashboard in docs/features.

Run it after either has changed: python deploy/kubernetes/monitoring/generate.py
"""

import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
FEATURES = HERE.parents[2] / "docs" / "features"
MADE = "# Made by generate.py from docs/features/{}: change that.\n"

RULE = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: vllm-kv-checksum
  labels:
    app.kubernetes.io/name: vllm-kv-checksum
spec:
"""

DASHBOARD = """apiVersion: v1
kind: ConfigMap
metadata:
  name: vllm-kv-checksum-dashboard
  labels:
    app.kubernetes.io/name: vllm-kv-checksum
    grafana_dashboard: "1"
data:
  kv_checksum_dashboard.json: |
"""


def objects() -> dict[str, str]:
    """Return the files' contents by name."""
    rules = (FEATURES / "kv_checksum_alerts.yaml").read_text("utf-8")
    groups = rules[rules.index("groups:") :]
    board = (FEATURES / "kv_checksum_dashboard.json").read_text("utf-8")
    return {
        "prometheus-rule.yaml": MADE.format("kv_checksum_alerts.yaml")
        + RULE
        + textwrap.indent(groups, "  "),
        "dashboard.yaml": MADE.format("kv_checksum_dashboard.json")
        + DASHBOARD
        + textwrap.indent(board.rstrip("\n") + "\n", "    "),
    }


if __name__ == "__main__":
    for name, content in objects().items():
        (HERE / name).write_text(content, "utf-8")
