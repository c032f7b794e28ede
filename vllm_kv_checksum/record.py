"""Write the RECORD of a wheel: one row per file, with its hash and size.

Format: https://packaging.python.org/en/latest/specifications/recording-installed-packages/
"""

import base64
import csv
import io
from dataclasses import dataclass, field


@dataclass
class Record:
    """Collects the rows of a new wheel's RECORD."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, digest: bytes, size: int) -> str:
        """Add a file of `size` bytes with this SHA-256; return the hash as RECORDs have it."""
        encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        self.rows.append((name, f"sha256={encoded}", str(size)))
        return self.rows[-1][1]

    def text(self, own_name: str) -> bytes:
        """Return the RECORD's content; `own_name` is its path in the wheel."""
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(
            [*self.rows, (own_name, "", "")]
        )
        return table.getvalue().encode("utf-8")
