"""Where the pages of a layer's keys and values lie, as arguments of the kernels that fill and read them."""

from cpu_kernels.arguments import Arguments


class HeadPages(Arguments):
    """Pages of keys or of values: a head's, in the order of place numbers, then the next head's."""

    first: int  # address of place 0 of the first head
    head_bytes: int  # between heads' pages
    place_bytes: int  # between consecutive place numbers of a page table


class KVPages(Arguments):
    """Pages of keys and of values; latents serve as both."""

    keys: HeadPages
    values: HeadPages
    of_window: int = 0  # 1 if places are those of the window layers' table, see records.page_table
