"""The Triton kernel itself; importing this imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["IS_INTERPRETED", "copy_pages"]


@triton.jit(
    do_not_specialize=[
        "first_row",
        "num_rows",
        "first_block",
        "num_blocks",
        "blocks_per_chunk",
        "chunk_items",
        "shift_items",
        "run_vectors",
        "tiles_per_run",
        "num_tiles",
    ],
    do_not_specialize_on_alignment=["rows", "ids"],
)
def copy_pages(
    pages,
    rows,
    ids,
    staged,
    first_row,
    num_rows,
    first_block,
    num_blocks,
    blocks_per_chunk,
    chunk_items,
    shift_items,
    run_vectors,
    tiles_per_run,
    num_tiles,
    INTO_PAGES: tl.constexpr,
    ALIGNED_ITEMS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ITEMS: tl.constexpr,
    STEPS: tl.constexpr,
):
    # A few programs walk over all tiles, so that as few multiprocessors are taken from the engine as are
    # launched. A tile is TILE_ITEMS of one run; TILES of them are in flight in a program at once.
    #
    # A step takes an equal part of each tile: a warp's worth where tiles are long, so that a warp stays with
    # one tile and its threads work out one address. Were a step to take tiles whole, every thread would have a
    # part of every tile and work out all their addresses.
    STEP_ITEMS: tl.constexpr = TILE_ITEMS // STEPS
    lane = tl.arange(0, STEP_ITEMS)[None, :]
    for at in range(tl.program_id(0) * TILES, num_tiles, tl.num_programs(0) * TILES):
        tile = at + tl.arange(0, TILES)
        live = tile < num_tiles
        run = tile // tiles_per_run
        begin = (tile % tiles_per_run) * TILE_ITEMS
        place = first_block + run % num_blocks
        row = rows + (first_row + run // num_blocks % num_rows) * 4
        chunk = run // num_blocks // num_rows
        block = tl.load(ids + chunk * blocks_per_chunk + place, mask=live, other=0)
        page_at = tl.load(row, mask=live, other=0) + block * tl.load(row + 1, mask=live, other=0)
        staged_at = tl.load(row + 2, mask=live, other=0) + place * tl.load(row + 3, mask=live, other=0)
        staged_at += chunk.to(tl.int64) * chunk_items + shift_items
        # What the host knows of the addresses and the compiler cannot: with it, items travel 16 bytes at a time.
        page = pages + (tl.multiple_of(page_at, ALIGNED_ITEMS) + begin)[:, None] + lane
        slot = staged + (tl.multiple_of(staged_at, ALIGNED_ITEMS) + begin)[:, None] + lane
        source = slot if INTO_PAGES else page
        target = page if INTO_PAGES else slot
        whole = live[:, None] & (lane >= 0)
        # A multiple, as the compiler can see: no access is cut in two by the end of its run.
        left = (run_vectors * ALIGNED_ITEMS - begin)[:, None]
        # Everything is read before anything is written: memory might overlap for all that the compiler knows,
        # and a read behind a write would wait for it.
        masks: tl.tuple = ()
        values: tl.tuple = ()
        for step in tl.static_range(STEPS):
            masks += (whole if EVEN else whole & (lane + step * STEP_ITEMS < left),)
            values += (tl.load(source + step * STEP_ITEMS, mask=masks[step]),)
        for step in tl.static_range(STEPS):
            tl.store(target + step * STEP_ITEMS, values[step], mask=masks[step])


IS_INTERPRETED = not isinstance(copy_pages, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set: then the kernel runs on the CPU, on host memory."""
