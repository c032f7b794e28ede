"""Kill processes while loads are in flight: clients get errors in time, nothing is verified wrongly, nothing stays.

The servers are forked from one process that imported vLLM (rig only). Loads are held in
flight by stopping P, which must answer D's reads.
"""

from __future__ import annotations

import contextlib
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest
from rig import processes
from rig.model import tiny_qwen3
from rig.mooncake_store import MooncakeStore
from rig.routing import prefill, prefill_decode
from rig.servers import PORTS, Server, free_port, own_ports, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4
BOUND_S = 60
"""Within this a client must have its answer, and a dead server's processes must be gone."""

LEASE_S = 6


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3("float32")


@pytest.fixture(scope="module")
def common(forks):
    return {"dtype": "float32", "fork_server": forks}


def producer(name, model, common, side_channel, port=None):
    lease = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    return Server(
        name,
        "kv_producer",
        model=model,
        port=port,
        transfer={"enable_kv_checksum": True, **lease},
        env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)},
        **common,
    )


class NotInFlight(Exception):
    """Raised if some load had ended before P was stopped: nothing can be seen of its end."""


def until_in_flight(run):
    """Run it again, with new servers, while loads are too quick to be met."""
    for _ in range(3):
        try:
            return run()
        except NotInFlight as error:
            print(f"once more: {error}")
    return run()


@contextlib.contextmanager
def loads_in_flight(p, *consumers):
    """Ask each consumer for 4 loads that P, stopped, does not serve; yield the answers to come, by consumer.

    Half of the loads are to be damaged. P goes on when the block ends.
    """
    asked = {
        d: [
            (f"{kind}-{d.name}-{n}", pairs.prompt_of(300, 10 * n + 7))
            for n, kind in enumerate(("clean", "flip", "clean", "flip"))
        ]
        for d in consumers
    }
    with ThreadPoolExecutor(4 * len(consumers)) as clients:
        params = {
            request_id: prefill(p, prompt, request_id=request_id)
            for requests in asked.values()
            for request_id, prompt in requests
        }
        with processes.stopped(p.family()):
            answers = {
                d: [
                    clients.submit(
                        d.completions,
                        prompt,
                        MAX_TOKENS,
                        params[request_id],
                        request_id=request_id,
                    )
                    for request_id, prompt in requests
                ]
                for d, requests in asked.items()
            }
            try:
                for d in consumers:
                    what = f"4 loads on {d.name}"
                    pairs.wait(lambda d=d: pairs.pending_loads(d) == 4, what, 20)
            except AssertionError as error:
                raise NotInFlight(str(error)) from None
            yield answers


def status(answer: Future[httpx.Response]) -> int:
    """Return an answer's HTTP status; 0 for a connection that was cut."""
    try:
        return answer.result(BOUND_S).status_code
    except httpx.TransportError:
        return 0


def check(p, d, name, seed):
    """Check that a clean load is verified and answered rightly, and a damaged one refused as D's policy says."""
    before = pairs.loads(d)
    for kind, length in (("clean", 200), ("flip", 201)):
        prompt = pairs.prompt_of(length, seed)
        request_id = f"{kind}-{name}"
        answer = prefill_decode(p, d, prompt, MAX_TOKENS, request_id=request_id)
        if kind == "flip" and d.transfer["kv_load_failure_policy"] == "fail":
            pairs.assert_failed(answer)
            continue
        expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
        assert [pairs.text_of(answer)] == expected
    counted = {k: v - before[k] for k, v in pairs.loads(d).items()}
    assert counted == {"verified": 1, "mismatch": 1, "unverified": 0}


def worker_of(server: Server, name: str) -> psutil.Process:
    """Return the worker that writes to the server's log under this name."""
    pids = set(re.findall(rf"\({name} pid=(\d+)\)", server.log_text()))
    (found,) = [x for x in server.family() if str(x.pid) in pids]
    return found


def test_a_worker_of_d_then_all_of_d(model, common):
    """P goes on, its leases end, and each new D at the same address verifies."""
    until_in_flight(lambda: end_a_worker_of_d_then_all_of_d(model, common))


def end_a_worker_of_d_then_all_of_d(model, common):
    port = free_port()

    def consumer(name, **kwargs):
        return pairs.consumer(name, model, "fail", port=port, **common, **kwargs)

    p = producer("killed-p", model, common, free_port())
    with serving(p):
        with serving(d := consumer("killed-d", tp=2)):
            check(p, d, "first", 20)
            time.sleep(1)
            before = p.checksum_tables()
            kill_with_loads_in_flight(p, d, {worker_of(d, "Worker_TP1")})
        with serving(d := consumer("killed-d-again")):
            check(p, d, "second", 30)
            kill_with_loads_in_flight(p, d, d.family())
        with serving(d := consumer("killed-d-last")):
            check(p, d, "third", 40)
            used = "vllm:kv_cache_usage_perc"

            def all_free():
                # An idle engine tells nothing new.
                p.completions([5], 1)
                return p.metric(used) == 0

            pairs.wait(all_free, "P frees what nobody pulled", 30)
            pairs.wait(lambda: p.checksum_tables() == before, "P's tables", 10)
    assert "KV checksums not sent" not in p.log_text()


def kill_with_loads_in_flight(p, d, victims):
    family, began = d.family(), time.monotonic()
    with loads_in_flight(p, d) as answers:
        d.kill(victims)
        assert all(status(answer) in (0, 500) for answer in answers[d])
        # A leader may be gone and not yet reaped while its last threads end.
        pairs.wait(lambda: not d.family(family) and not d.alive(), "D's processes end")
    print(f"{d.name}: over after {time.monotonic() - began:.1f} s")


def test_p_with_loads_in_flight(model, common):
    """D's policy decides; D goes on, and a new P at the same address is verified against."""
    until_in_flight(lambda: end_p_with_loads_in_flight(model, common))


def end_p_with_loads_in_flight(model, common):
    side_channel = free_port()
    p = producer("killed-p1", model, common, side_channel)
    consumers = {
        mode: pairs.consumer(f"killed-{mode}", model, mode, **common)
        for mode in ("fail", "recompute")
    }
    prompts = [pairs.prompt_of(300, 10 * n + 7) for n in range(4)]
    with serving(*consumers.values()):
        with serving(p):
            expected = pairs.reference_texts(p, prompts, MAX_TOKENS)
            for mode, d in consumers.items():
                check(p, d, f"before-{mode}", 50)
            time.sleep(1)
            before = {
                d: (d.checksum_tables(), pairs.loads(d)) for d in consumers.values()
            }
            with loads_in_flight(p, *consumers.values()) as answers:
                p.kill()
                got = {
                    mode: [answer.result(BOUND_S) for answer in answers[d]]
                    for mode, d in consumers.items()
                }
        assert [a.status_code for a in got["fail"]] == [500] * 4
        assert [pairs.text_of(a) for a in got["recompute"]] == expected
        for d in consumers.values():
            # The loads failed by themselves: nothing was there to be judged.
            assert pairs.loads(d) == before[d][1]
            pairs.wait(
                lambda d=d: d.checksum_tables() == before[d][0], "D's tables", 10
            )
            alone = pairs.prompt_of(40, 60)
            pairs.text_of(d.completions(alone, MAX_TOKENS))
        with serving(p := producer("killed-p2", model, common, side_channel, p.port)):
            for mode, d in consumers.items():
                check(p, d, f"after-{mode}", 70)
        for d in consumers.values():
            assert d.log_text().count("KV checksum mismatch: request") == 2


def test_mooncake_master_under_load(model, common, tmp_path):
    """Without the store requests are computed; what a new master is given verifies again."""
    checked = {"enable_kv_checksum": True, **pairs.MODES["recompute"]}
    with MooncakeStore(tmp_path) as store, ThreadPoolExecutor(6) as clients:
        a, b = (
            store.instance(f"killed-{x}", role, model=model, transfer=checked, **common)
            for x, role in (("a", "kv_producer"), ("b", "kv_consumer"))
        )

        def ask_both(seed):
            """Return A's answer, which A computes and stores, and B's."""
            prompt = pairs.prompt_of(200, seed)
            first = pairs.text_of(a.completions(prompt, MAX_TOKENS))
            time.sleep(0.3)
            return first, pairs.text_of(b.completions(prompt, MAX_TOKENS))

        with serving(a, b):
            for first, second in clients.map(ask_both, range(100, 106)):
                assert first == second
            assert pairs.loads(b)["verified"] > 0
            time.sleep(1)
            before = a.checksum_tables(), b.checksum_tables()
            under_load = [clients.submit(ask_both, n) for n in range(200, 248)]
            time.sleep(1)
            store.kill_master()
            time.sleep(2)
            assert not all(answer.done() for answer in under_load)
            store.start_master()
            for answer in under_load:
                first, second = answer.result(BOUND_S)
                assert first == second
            verified = pairs.loads(b)["verified"]
            seeds = iter(range(300, 400))

            def verified_again():
                ask_both(next(seeds))
                return pairs.loads(b)["verified"] > verified

            pairs.wait(verified_again, "loads from the new master", 30)
            loads = pairs.loads(b)
            assert loads["mismatch"] == loads["unverified"] == 0
            pairs.wait(
                lambda: (a.checksum_tables(), b.checksum_tables()) == before,
                "the tables",
                10,
            )


def test_pytest_s_workers_give_their_servers_other_ports(monkeypatch):
    """The rig's own: a server of another worker answered in the place of one that was just starting."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    given = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        given += [*own_ports()]
    assert len(given) == len(set(given)) == len(PORTS) and set(given) == set(PORTS)
