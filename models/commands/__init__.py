"""What the commands of ``numden`` run: with ``cli``, all of the models that knows about ranks."""
