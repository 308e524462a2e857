"""A canary (kvref.canary) as files that engines load: a folder as Hugging Face's, a GGUF for llama.cpp. And its words."""
