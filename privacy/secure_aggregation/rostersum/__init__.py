"""RosterSum v2: secure aggregation for 3 to 100 sites of one pinned roster; its words: `messages.py`, `terms.py`."""
