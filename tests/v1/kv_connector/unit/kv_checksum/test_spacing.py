# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the run of evenly spaced damage: its four checks are right, and it can fail."""

import json
import sys
import zlib

import fault_spacing
import numpy as np
import plots
import pytest
from spacing import checks, sets

MASK = 2**64 - 1
GOLDEN, FOLD = 0x9E3779B97F4A7C15, 0x9E3779B1
SIGN = 1 << 63


def weight(layer, head, j):
    return GOLDEN * (2 * (layer * 2**16 + head) + 1) * (2 * j + 1) & MASK


def term(x, w, definition):
    """Evaluate the definitions once more, in integers without an end."""
    y = (x ^ x >> 33) * w & MASK
    if definition == 1:
        return y ^ y >> 32
    t = (y >> 32) * FOLD
    return y ^ ((t ^ t >> 32) & 0xFFFFFFFF)


def change(places, before, after, definition):
    """Return the change of the checksum, by the benchmark's code."""
    weights = [checks.weight(*(np.uint64(n) for n in place)) for place in places]
    arrays = [np.array(x, np.uint64) for x in (weights, before, after)]
    return int(checks.checksum_change(*arrays, definition))


def some_sets(number, seed=3):
    """Yield drawn sets of every kind of cell, with their number of places."""
    state = np.array([seed], np.uint64)
    drawn = sets.empty_set()
    listing = fault_spacing.cells(seed)
    for cell in (listing * (1 + number // len(listing)))[:number]:
        kv = cell.kv
        source = cell.place.ranges, cell.damage, kv.bits, kv.pool
        n = sets.draw_set(state, *source, drawn)
        yield cell, sets.Set(*(part[:n].copy() for part in drawn))


def test_terms_are_those_of_the_definitions():
    random = np.random.default_rng(1)
    numbers = random.integers(0, 2**64, 1000, np.uint64)
    numbers[:3] = 0, SIGN, MASK
    for x, w in zip(numbers, numbers[::-1] | np.uint64(1), strict=True):
        for definition in (1, 2):
            found = int(checks.term(x, w, definition))
            assert found == term(int(x), int(w), definition)


def test_sets_are_what_they_are_called():
    for cell, drawn in some_sets(600):
        layers, heads, pieces = (np.unique(c) for c in drawn.coordinates.T)
        for found, (low, high) in zip(
            (layers, heads, pieces), cell.place.ranges, strict=True
        ):
            assert low <= len(found) <= high
            assert len(np.unique(np.diff(found))) <= 1
        assert len(drawn.numbers) == len(layers) * len(heads) * len(pieces)
        assert len(np.unique(drawn.numbers)) == len(drawn.numbers)
        assert len(np.unique(pieces // np.uint64(checks.PIECES))) == 1
        for place, w in zip(drawn.coordinates.tolist(), drawn.weights, strict=True):
            assert int(w) == weight(*place)
        assert (drawn.before != drawn.after).any()
        if cell.damage == sets.FLIP:
            (flip,) = np.unique(drawn.before ^ drawn.after)
            assert int(flip).bit_count() == 1
        elif cell.damage == sets.ROTATE:
            assert (drawn.after == np.roll(drawn.before, -1)).all()
        else:
            assert (drawn.after == drawn.before[::-1]).all()


def test_every_bit_is_flipped():
    flips = {
        int(drawn.before[0] ^ drawn.after[0])
        for cell, drawn in some_sets(4000)
        if cell.damage == sets.FLIP
    }
    assert flips == {1 << bit for bit in range(64)}


def test_other_checks_change_as_those_of_the_whole_block():
    """Compare with zlib's checks of a block of random bytes."""
    tables = checks.crc_tables()
    content = np.random.default_rng(2).bytes(8 * checks.BLOCK_PIECES)
    block = np.frombuffer(bytearray(content), "<u8")
    for _, drawn in some_sets(300):
        block[drawn.numbers] = drawn.before
        old_adler, old_crc = zlib.adler32(block), zlib.crc32(block)
        block[drawn.numbers] = drawn.after
        new_adler, new_crc = zlib.adler32(block), zlib.crc32(block)
        places = drawn.numbers, drawn.before, drawn.after
        low, high = checks.adler_change(*places)
        assert low == ((new_adler & 0xFFFF) - (old_adler & 0xFFFF)) % 65521
        assert high == ((new_adler >> 16) - (old_adler >> 16)) % 65521
        assert checks.crc_change(*places, *tables) == old_crc ^ new_crc


@pytest.mark.parametrize(
    "places",
    [
        [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)],  # two layers, two heads
        [(0, 0, 0), (0, 0, 2), (0, 0, 4), (0, 0, 6)],  # equally spaced pieces
    ],
)
def test_what_definition_1_misses_definition_2_sees(places):
    """Flip the signs of four float32 zeros, of which two were negative."""
    before = [0, SIGN, SIGN, 0]
    after = [x ^ SIGN for x in before]
    assert change(places, before, after, 1) == 0
    assert change(places, before, after, 2) != 0


def test_definition_2_has_its_sets_too():
    """Show one set in some ten million: the design document's limit is real."""
    places = [(layer, 5, 0xECBCC) for layer in (0, 17, 34, 51)]
    before = [SIGN, 0, 0, SIGN]
    after = [x ^ SIGN for x in before]
    terms = zip(places, before, after, strict=True)
    exact = sum(term(a, weight(*p), 2) - term(b, weight(*p), 2) for p, b, a in terms)
    assert exact % 2**64 == 0
    assert change(places, before, after, 2) == 0


def main(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["fault_spacing.py", *options])
    return fault_spacing.main()


def test_a_short_run_misses_nothing_by_definition_2(monkeypatch, capsys, tmp_path):
    """Run on one thread and on two: the plot's numbers are the table's."""
    rows = []
    for jobs in "12":
        file = tmp_path / jobs
        options = ["--sets", "300000", "--seed", "5", "--jobs", jobs]
        assert main(monkeypatch, *options, "--json", str(file)) == 0
        rows.append(json.loads(file.read_text())["cells"])
    assert rows[0] == rows[1]
    missed = {n: sum(row["missed"][n] for row in rows[0]) for n in checks.NAMES}
    assert missed["definition 1"] > 0 == missed["definition 2"]
    assert missed["Adler-32"] > 0
    assert len(rows[0]) == 7 * (10 + 9 + 9)
    out = capsys.readouterr().out
    assert "| 16 pieces | values rotated |" in out
    assert "| 0 and -0 | float32 |" in out
    shares = plots.shares({"cells": rows[0]})
    assert set(shares) == {place.name for place in sets.PLACES}
    assert sum(m["definition 1"] for _, m in shares.values()) == missed["definition 1"]


def test_definition_1_in_its_place_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(fault_spacing, "DEFINITIONS", (1, 1))
    only = ["--only", "4 pieces, values rotated, 0 and -0, float32"]
    assert main(monkeypatch, "--sets", "20000", *only) == 1
    assert "definition 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sets", "0"], "--sets must be at least 1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--only", "5 pieces"], "is in no name"),
    ],
)
def test_bad_options_are_named(monkeypatch, capsys, options, said):
    with pytest.raises(SystemExit):
        main(monkeypatch, *options)
    assert said in capsys.readouterr().err


def test_what_ran_before_it_was_stopped_is_printed(monkeypatch, capsys, tmp_path):
    run = fault_spacing.run

    def stopped(listing, sets, *rest):
        run(listing, 1000, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_spacing, "run", stopped)
    file = tmp_path / "spacing.json"
    assert main(monkeypatch, "--jobs", "1", "--json", str(file)) == 130
    assert json.loads(file.read_text())["stopped"]
    out, err = capsys.readouterr()
    assert "| 4 pieces | one bit flipped |" in out and "stopped" in err


def result(missed):
    cells = [
        {"place": name, "few_values": few, "sets": 1000, "missed": missed}
        for name in ("4 pieces", "8 pieces")
        for few in (True, False)
    ]
    return {"cells": cells}


def test_the_plot_says_what_it_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result(dict.fromkeys(checks.NAMES, 0))))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(file), str(tmp_path / "a.svg")])
    assert plots.main() == 1
    assert "pip install matplotlib==" in capsys.readouterr().err


def test_the_plot_is_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    missed = {"definition 1": 7, "definition 2": 0, "Adler-32": 500, "CRC-32": 0}
    files = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in files:
        plots.draw(result(missed), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_text().count("0 of 1,000") == 4
