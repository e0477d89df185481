"""Finished runs side by side: tables, statistics, pairs of methods, figures, a page."""
