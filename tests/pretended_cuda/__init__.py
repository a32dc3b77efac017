"""CUDA pretended: torch's real CUDA build on a machine without a GPU, and what is checked with it.

    install.py       a virtual environment with torch's CUDA wheel, and none of the libraries of NVIDIA that it links
    libraries.py     those libraries, made of native/ and of the symbols that torch's own libraries leave undefined
    native/          a CUDA runtime whose device memory is host memory, whose kernels compute nothing, and that logs
    log.py           that log in Python, with marks of what each op reads and writes
    detector.py      races in a log: vector clocks of streams and threads
    marking.py       graphs whose ops mark what they read and write; failing steps
    programs.py      random training programs in which races are looked for
    mutants.py       mistakes in fxremat's copies, each of which the detector must find
    startup.py       changes of torch and fxremat in every process, which site/sitecustomize.py makes
    attention.py     cuDNN's attention, as far as its memory goes
    memory.py        what torch's caching allocator counts, against predicted peaks
    reserved.py      what it reserves, against the model of it and against plans
    dispatch.py      which attention is chosen and which ops are captured, against costs="H100" and others
    without_numbers.py   tests/test_cuda.py without its comparisons of numbers
    report.py        results as a table, as JSON and in docs/pretended-cuda.md

`python -m tests.pretended_cuda` runs all of it in the environment that `install.py` has made. Real are the caching
allocator, streams, events, generators, dispatch, autograd's threads, autocast, Inductor and Triton down to the launch.
Not real are numbers, times and what the libraries of NVIDIA allocate for themselves.
"""
