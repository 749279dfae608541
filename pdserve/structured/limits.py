"""The limits of a grammar, by which neither its compilation nor one of its masks takes long or much memory.

The library counts work, not time, so a grammar that is refused is refused on every machine. Times are those of its authors
(`ParserLimits` of its parser/src/api.rs).
"""

from __future__ import annotations

from typing import Final

import llguidance

LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,  # the library's default: 20 ms; the schema of FHIR, one of the largest in use, needs half
    step_lexer_fuel=100_000,  # half of the default: 7 ms for one mask
    step_max_items=25_000,  # half of the default: 1.3 ms for one mask
    max_lexer_states=20_000,  # 1 to 2 kB each, so 40 MB a grammar; the default is 250,000
    max_grammar_size=250_000,  # half of the default; FHIR needs 200,000
    verbose_errors=False,  # an error must not quote the grammar or the output into logs
)
CHECK_TIMEOUT_S: Final = 5.0
"""The longest time in which a grammar must compile. Its limits allow far less on an idle core; some work, such as reading the
text, is not counted."""
MAX_COMPILED: Final = 64
"""The most compiled grammars that are kept. Each has at most 40 MB of lexer states, if it is hostile."""
