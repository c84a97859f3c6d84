"""The flow benchmark runs, and its figures order the policies as the study did that they were designed by."""

from benchmarks.flow import BOUNDS, DESIGN_STEP_S, measure


def test_policies_cost_what_they_were_designed_to() -> None:
    found = {row["name"].replace("  ", " "): row for row in measure(quick=True)}
    for bound in BOUNDS:
        step_s = {policy: found[f"{policy} eta={bound}"]["step_s"] for policy in DESIGN_STEP_S}
        assert step_s["keep"] <= 1.02 * min(step_s["wait"], step_s["drop"])
        for policy, figures in DESIGN_STEP_S.items():
            figure = figures[BOUNDS.index(bound)]
            assert abs(step_s[policy] / figure - 1) < 0.25, (policy, bound)
        for policy in ("wait", "keep", "mask"):
            assert abs(found[f"{policy} eta={bound}"]["length_bias"]) < 0.02
    assert found["drop eta=1"]["length_bias"] < -0.05
