"""Steps made of other people's trainers, for ``check_step``. Each imports its framework lazily."""
