"""Side-by-side benchmarks: the same work done by Parley and by another system, one after the other, in one run."""
