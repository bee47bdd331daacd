"""Plans: drawn once from seed, epoch and index, and obeyed wherever the sample runs."""

from __future__ import annotations

import numpy as np

from minato.chain.plans import draw_plans, obeying


class Scale:
    """Multiplies by a drawn factor."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.drawn = 0

    def plan(self, rng: np.random.Generator, meta: object) -> float:
        self.drawn += 1
        return float(rng.uniform(1, self.most)) * (1.0 if meta is None else float(str(meta)))

    def apply(self, sample: float, plan: float) -> float:
        return sample * plan

    def __call__(self, sample: float) -> float:
        return self.apply(sample, self.plan(np.random.default_rng(), None))


def negate(sample: float) -> float:
    return -sample


def test_plans_are_a_function_of_seed_epoch_and_key():
    steps = [Scale(2), negate, Scale(2)]
    plans = draw_plans(steps, 7, 1, 42)
    assert plans == draw_plans(steps, 7, 1, 42)
    assert plans[1] is None
    assert plans[0] != plans[2]
    different = [
        draw_plans(steps, *key) for key in ((8, 1, 42), (7, 2, 42), (7, 1, 43), (7, 1, "42"))
    ]
    assert all(plans != other for other in different)


def test_what_was_planned_is_obeyed_and_not_drawn_again():
    steps = [Scale(2), negate]
    plans = draw_plans(steps, 7, 1, 42)
    first, second = obeying(steps, plans)
    assert second(first(10.0)) == -10.0 * plans[0]
    assert steps[0].drawn == 1


def test_what_is_known_of_the_sample_reaches_the_plan():
    (plain,), (told,) = draw_plans([Scale(2)], 0, 0, 0), draw_plans([Scale(2)], 0, 0, 0, meta="3")
    assert told == 3 * plain
