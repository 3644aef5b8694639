"""A server with the API of OpenAI, whose users cost a state each."""
