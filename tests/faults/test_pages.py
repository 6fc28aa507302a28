"""Markup in users' data stays text on the page."""

from __future__ import annotations

import pages
import pytest


@pytest.mark.skipif(pages.BROWSER is None, reason="there is no chromium")
def test_labels_columns_and_file_names_that_are_markup_stay_text(tmp_path):
    pytest.importorskip("playwright")
    tally = pages.shown(tmp_path)
    assert tally.failures == []
    assert tally.tried == 2
