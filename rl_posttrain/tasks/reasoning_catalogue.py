"""What reasoning-gym 0.1.25 offers, and what of it can be a reward. Names and reasons only, so that reading
them costs nothing; a test compares the names with the installed package."""

from __future__ import annotations

_EXECUTES = "its scorer executes the completion as code (eval or sympy's parse_expr), which could forge verdicts"
_NO_ANSWER = "its items carry no answer (answer=None), so there is neither a demonstration nor a check of the scorer"

BLOCKED: dict[str, str] = {
    "complex_arithmetic": "its scorer gives full marks to the constant 'nan'",
    "game_of_life_halting": "its scorer gives full marks to any text",
    "puzzle24": f"its scorer never checks that the given numbers are used, and {_EXECUTES}",
    "coin_flip": "its scorer gives full marks to the constant '0' on 95% of the items (absolute tolerance)",
    "codeio": "its items differ between two runs with the same seed, and it executes programs to make them",
    "composite": "it is a mixture of other generators: give those their own weights instead",
    "boxnet": _NO_ANSWER,
    "graph_color": _NO_ANSWER,
    "propositional_logic": _NO_ANSWER,
    "rubiks_cube": _NO_ANSWER,
    "rush_hour": _NO_ANSWER,
    "countdown": _EXECUTES,
    "n_queens": _EXECUTES,
    "polynomial_multiplication": _EXECUTES,
    "simple_integration": _EXECUTES,
    "intermediate_integration": _EXECUTES,
}

# Their scorers execute the completion too, but only one answer is right: it is compared here instead.
COMPARED_EXACTLY = frozenset({"binary_matrix", "spiral_matrix", "string_insertion"})

USABLE = tuple(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    binary_matrix bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic
    color_cube_rotation count_bits count_primes course_schedule cryptarithm decimal_arithmetic
    decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
    game_of_life gcd group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu knight_swap knights_knaves
    largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle
    manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format
    number_sequence number_sorting palindrome_generation palindrome_partitioning path_star
    polynomial_equations pool_matrix power_function prime_factorization products quantum_lock ransom_note
    rearc rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path
    simple_equations simple_geometry sokoban spell_backward spiral_matrix string_insertion
    string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals
    tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
    """.split()
)
