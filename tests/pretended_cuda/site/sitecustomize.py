"""Start `tests.pretended_cuda.startup` in every process of Python that has this folder in its PYTHONPATH.

Python imports a module of this name when it begins. `install.Environment.variables` puts the folder into the
environment, which child processes inherit.
"""

from tests.pretended_cuda.startup import watch_imports

watch_imports()
