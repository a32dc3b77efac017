"""Random chains for the tests of the solvers."""

from hypothesis import strategies as st

from fxremat.chains.chain import Block, Chain, Option

times = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 50, 1000]))
sizes = st.integers(0, 9)
scratches = st.sampled_from([0, 0, 1, 4, 15])  # large enough to decide, now and then


@st.composite
def blocks(draw: st.DrawFn, options: int = 2) -> Block:
    """A block with small whole sizes, wide times, and every field in use."""
    output = draw(sizes)
    backward = draw(times)
    saves = [
        Option(
            saved_bytes=output + draw(sizes),
            backward_time=backward + draw(times),
            backward_scratch=draw(scratches),
            save_scratch=draw(st.none() | scratches),
        )
        for _ in range(draw(st.integers(0, options)))
    ]
    return Block(
        forward_time=draw(times),
        backward_time=backward,
        output_bytes=output,
        saved_bytes=output + draw(sizes),
        grad_bytes=draw(st.none() | sizes),
        forward_scratch=draw(scratches),
        backward_scratch=draw(scratches),
        weight_grad_bytes=draw(st.sampled_from([0, 0, 1, 4])),
        held_bytes=draw(st.sampled_from([0, 0, 2])),
        save_scratch=draw(st.none() | scratches),
        options=tuple(saves),
    )


def chains(largest: int, options: int = 2) -> st.SearchStrategy[Chain]:
    """Chains of 1 to `largest` such blocks."""
    return st.builds(
        Chain,
        blocks=st.lists(blocks(options), min_size=1, max_size=largest).map(tuple),
        input_bytes=sizes,
        input_grad_bytes=st.none() | sizes,
    )
