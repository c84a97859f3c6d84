"""instructor, by a JSON schema."""

import instructor
import openai
from pydantic import BaseModel


class Sum(BaseModel):
    value: int


client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model="policy", response_model=Sum, messages=[{"role": "user", "content": "Add."}], max_retries=3
)
assert found.value == 7
