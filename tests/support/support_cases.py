"""All cases of the support matrix, in the order of its rows."""

from __future__ import annotations

import cases_arguments
import cases_buffers
import cases_constants
import cases_effects
import cases_functions
import cases_options
import cases_programs
import cases_shardings

CASES = [
    case
    for module in (
        cases_arguments,
        cases_buffers,
        cases_shardings,
        cases_constants,
        cases_effects,
        cases_programs,
        cases_options,
        cases_functions,
    )
    for case in module.section.cases
]
