"""The Pareto frontier of candidate programs: the survey, its cache, the op-by-op search, and the lower bound."""
