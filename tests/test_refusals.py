"""What is refused, and in which words."""

from __future__ import annotations

import math

import pytest
import torch
from common import SGD, leaf, plain
from torch import nn

import bilevel
from bilevel import Alternating, OptionError, Penalty, Problem, ProblemError, VariableError, solve


@pytest.mark.parametrize("name", ["lower_equalities", "lower_inequalities"])
def test_other_methods_refuse_lower_constraints_with_a_clear_sentence(quadratic, name):
    problem = Problem(quadratic.upper, quadratic.lower, **{name: [lambda u, v, batch: v]})
    with pytest.raises(OptionError, match=f"{name}.* need Penalty.*project_lower"):
        solve(problem, Alternating(), *quadratic.start(), max_steps=1, seed=0)


@pytest.mark.parametrize("name", ["upper", "lower"])
def test_objective_that_is_no_function_is_refused(quadratic, name):
    with pytest.raises(ProblemError, match=f"{name} must be a function"):
        Problem(**({"upper": quadratic.upper, "lower": quadratic.lower} | {name: 3}))


def test_constraint_that_is_no_function_is_refused(quadratic):
    with pytest.raises(ProblemError, match="inequalities must be a function"):
        Problem(quadratic.upper, quadratic.lower, inequalities=[1])


STOCHASTIC_ONLY = {
    "lower_steps": 3,
    "lam": 1.0,
    "epsilon": 0.1,
    "nu": 0.0,
    "multipliers": True,
    "gamma_factor": 1.1,
    "lam_factor": 0.9,
    "epsilon_factor": 0.9,
    "advances": 3,
    "advance_every": 3,
    "warm_up": 0.1,
    "decay": "linear",
    "rate_power": 0.5,
    "upper_optimizer": SGD,
    "lower_optimizer": SGD,
    "lower_batches": "fresh",
    "cotangent": "same",
}


@pytest.mark.parametrize(("name", "value"), STOCHASTIC_ONLY.items())
def test_option_of_the_stochastic_mode_is_refused_without_data(quadratic, name, value):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=f"{name} is not used in deterministic mode.*mode='stochastic'"):
        solve(quadratic.problem, Penalty(**{name: value}), u, v, max_steps=1, seed=0)


def test_deterministic_mode_refuses_data(quadratic):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match="mode='deterministic' needs objectives without data"):
        solve(quadratic.problem, Penalty(mode="deterministic"), u, v, quadratic.data(), max_steps=1, seed=0)


def test_accumulation_without_data_is_refused(quadratic):
    u, v = quadratic.start()
    with pytest.raises(OptionError, match=r"accumulate needs data.*accumulate=2"):
        solve(quadratic.problem, plain(), u, v, max_steps=1, accumulate=2, seed=0)


def frozen_module() -> nn.Module:
    module = nn.Linear(2, 1)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


BAD_VARIABLES = {
    "without grad": (lambda: torch.zeros(2), r"must require grad; got a tensor of shape \(2,\).*requires_grad_\(\)"),
    "without grad in a dict": (lambda: {"w": torch.zeros(2)}, r"\['w'\] must require grad"),
    "whole numbers": (lambda: torch.zeros(2, dtype=torch.int64), "must hold real numbers; got dtype torch.int64"),
    "not a leaf": (lambda: leaf(1.0, 2.0) * 2, "must be a leaf tensor"),
    "a number": (lambda: 3.0, "must be a tensor, a module, Rows.* got float"),
    "nothing": (lambda: None, "must be a tensor, a module, Rows.* got NoneType"),
    "an empty dict": (dict, "at least one"),
    "an empty list": (list, "at least one"),
    "a frozen module": (frozen_module, "must have a parameter that requires grad"),
    "a list of numbers": (lambda: [1.0], r"\['0'\] must be a tensor or Rows; got float"),
}


@pytest.mark.parametrize("which", ["u", "v"])
@pytest.mark.parametrize(("make", "words"), BAD_VARIABLES.values(), ids=BAD_VARIABLES)
def test_variable_that_cannot_be_optimised_is_refused_by_name(quadratic, which, make, words):
    good = dict(zip("uv", quadratic.start(), strict=True))
    with pytest.raises(VariableError, match=f"^{which}.*{words}"):
        solve(quadratic.problem, Penalty(), **(good | {which: make()}), max_steps=1, seed=0)


def test_tensor_that_is_both_u_and_v_is_refused(quadratic):
    x = leaf(0.0, 0.0)
    with pytest.raises(OptionError, match="u and v must not share tensors"):
        solve(quadratic.problem, Penalty(), [x], x, max_steps=1, seed=0)


def test_projection_of_a_name_that_is_not_there_is_refused():
    problem = Problem(lambda u, v, _: v.sum(), lambda u, v, _: (v * v).sum(), project_upper={"w": bilevel.Box(0, 1)})
    with pytest.raises(ProblemError, match=r"names 'w', which u does not have; it has 'x'"):
        solve(problem, Penalty(), {"x": leaf(0.0)}, leaf(0.0), max_steps=1, seed=0)


def good_f(u, v, batch):
    return torch.sum((v - 1) ** 2)


def good_g(u, v, batch):
    return torch.sum((v - u) ** 2)


BAD_PROBLEMS = {
    "lower without v": (Problem(good_f, lambda u, v, b: torch.sum(u**2)), "lower must depend on v"),
    "lower with v detached": (Problem(good_f, lambda u, v, b: good_g(u, v.detach(), b)), "lower must depend on v"),
    "lower as numbers": (Problem(good_f, lambda u, v, b: (v - u) ** 2), r"lower must return one number.*\(2,\)"),
    "upper as numbers": (Problem(lambda u, v, b: v, good_g), r"upper must return one number.*\(2,\)"),
    "upper as a float": (Problem(lambda u, v, b: 1.0, good_g), "upper must return a tensor; got float"),
    "upper as nothing": (Problem(lambda u, v, b: None, good_g), "upper must return a tensor; got NoneType"),
    "NaN above": (Problem(lambda u, v, b: good_f(u, v, b) * math.nan, good_g), "upper must be finite; it is .*nan"),
    "infinity below": (Problem(good_f, lambda u, v, b: good_g(u, v, b) / 0), "lower must be finite; it is .*inf|nan"),
    "NaN in a constraint": (
        Problem(good_f, good_g, equalities=[lambda u, v, b: torch.log(u - 1)]),
        "constraint 0 must be finite",
    ),
    "a slope that is not finite": (
        Problem(good_f, lambda u, v, b: torch.sqrt(v**2).sum() + good_g(u, v, b)),
        "the gradient of lower in v must be finite",
    ),
    "shapes that do not match": (
        Problem(good_f, lambda u, v, b: torch.sum(v @ torch.ones(3, dtype=torch.float64))),
        r"lower failed at the first evaluation with RuntimeError.*u of shape \(2,\); v of shape \(2,\); batch None",
    ),
    "an error above": (
        Problem(lambda u, v, b: v["weight"], good_g),
        "upper failed at the first evaluation with IndexError",
    ),
    "a constraint that is no tensor": (
        Problem(good_f, good_g, inequalities=[lambda u, v, b: 0.0]),
        "constraint 0 must return a tensor; got float",
    ),
}


@pytest.mark.parametrize("mode", ["deterministic", "stochastic"])
@pytest.mark.parametrize(("problem", "words"), BAD_PROBLEMS.values(), ids=BAD_PROBLEMS)
def test_problem_that_cannot_be_solved_is_refused_before_anything_changes(problem, words, mode):
    u, v = leaf(0.0, 0.0), leaf(0.0, 0.0)
    with pytest.raises(ProblemError, match=words):
        solve(problem, Penalty(mode=mode), u, v, max_steps=1, seed=0)
    assert not u.any()
    assert not v.any()
    with pytest.raises(ProblemError, match=words):
        bilevel.check(problem, u, v)


def test_constraint_whose_shape_changes_is_refused():
    problem = Problem(
        lambda u, v, batch: torch.sum((v - 1) ** 2),
        lambda u, v, batch: torch.sum((v - u) ** 2),
        inequalities=[lambda u, v, batch: u.expand(batch)],
    )
    with pytest.raises(ProblemError, match="constraint 0 must return the same shape for every batch"):
        solve(problem, plain(), leaf(0.0), leaf(0.0), ([2, 3], [0]), max_steps=3, seed=0)
