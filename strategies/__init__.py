"""How a cohort's updates become the next model: one file per strategy, each reading like its paper."""
