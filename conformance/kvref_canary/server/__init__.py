"""OpenAI-compatible servers that have loaded a canary: judged over HTTP, by the tokens that they generate."""
