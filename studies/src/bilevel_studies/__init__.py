"""The paper's tables and figures: settings as data, and the paper's numbers next to ours."""
