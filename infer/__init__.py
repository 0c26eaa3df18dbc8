"""How tokens come out: generation loops, sampling and acceptance."""
