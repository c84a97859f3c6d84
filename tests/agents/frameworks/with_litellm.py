"""A loop on litellm.completion."""

import json

import litellm

tools = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
messages = [{"role": "user", "content": "Add."}]
while True:
    message = litellm.completion("openai/policy", messages=messages, tools=tools).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
assert message.content == "It is 7.", message
