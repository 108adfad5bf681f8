"""Published plans of an OPT-350: what is read, where layers lie, and what goes between nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from tests.benchmarks.published.runs import Split
from tests.benchmarks.published.sailor_plans import GIGABIT, HOP, SLINGSHOT, node_rate, read, summed

HEADER = "model,pp,dp,mbs,gbs,layers_per_stage,devices,measured_s,grad_sum_s,peak_bytes\n"
ROW = "OPT-350,2,2,2,256,12-14,RTX-3090x8/tp8*1|RTX-2080x8/tp8*1;Titan-RTXx8/tp8*2,66,7.2,6818889728\n"


def test_a_row_has_its_degrees_devices_and_layers(tmp_path: Path) -> None:
    (tmp_path / "plans.csv").write_text(HEADER + ROW)
    (plan,) = read(tmp_path / "plans.csv")
    assert plan.split == Split(2, 8, 2, 2, 64, zero=0) and plan.batch == 256 and not plan.is_like
    assert plan.kinds == (("RTX-3090", "RTX-2080"), ("Titan-RTX", "Titan-RTX"))
    assert [stage.counts for stage in plan.rank_pieces] == [(1, 11, 0, 0), (0, 13, 1, 1)]


@pytest.mark.parametrize("wrong", [ROW.replace("12-14", "12-13"), ROW.replace("x8/tp8*2", "x4/tp8*2")])
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "plans.csv").write_text(HEADER + wrong)
    with pytest.raises(InputError, match="the published table"):
        read(tmp_path / "plans.csv")


def test_ranks_of_a_node_share_its_card_but_on_gh200s() -> None:
    assert node_rate("GH-96", 4) == 4 * SLINGSHOT and node_rate("RTX-3090", 8) == GIGABIT
    split = Split(2, 8, 1, 2, 64, zero=0)
    assert summed(1e6, ("RTX-3090", "RTX-2080"), split) == pytest.approx(2 * HOP + 4e6 * 8 / GIGABIT)
