"""Values of a table on a card: short, exact where they are whole, and never a mark that only programs know."""

import math

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilevel.report.page import cell_text


@pytest.mark.parametrize("value", [None, float("nan"), np.float32("nan"), pandas.NA, pandas.NaT])
def test_what_is_not_there_is_missing(value):
    assert cell_text(value) == "missing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1 + 0.2, "0.3"),
        (0.12345678901234567, "0.123457"),
        (np.float32(0.1), "0.1"),
        (1001.0, "1001"),
        (123456789.0, "123456789"),  # a whole number in a column with missing ones
        (123456789, "123456789"),
        (np.int64(7), "7"),
        (1234567.25, "1.23457e+06"),
        (-1e-9 / 3, "-3.33333e-10"),
        (1e300, "1e+300"),
        (-0.0, "0"),
        (float("-inf"), "-inf"),
        (True, "True"),
        ("nan", "nan"),  # a text is shown as it is
        ("0.12345678901234567", "0.12345678901234567"),
        (pandas.Timestamp("2026-01-02"), "2026-01-02 00:00:00"),
    ],
)
def test_numbers_are_short_and_texts_as_they_are(value, text):
    assert cell_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_that_is_not_whole_has_six_digits_and_is_close(value):
    text = cell_text(value)
    assert math.isclose(float(text), value, rel_tol=5.1e-6, abs_tol=1e-322)  # half a unit of the sixth digit
    if not value.is_integer() or abs(value) >= 1e15:
        assert sum(sign.isdigit() for sign in text.split("e")[0].lstrip("-0.")) <= 6
