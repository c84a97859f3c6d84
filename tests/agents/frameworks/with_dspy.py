"""DSPy, whose every call starts anew."""

import dspy

dspy.configure(lm=dspy.LM("openai/policy", cache=False))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


try:
    print(dspy.Predict("question -> answer")(question="Add."))
except Exception as error:  # the policy does not speak DSPy's form; the calls were made
    print(type(error).__name__)
