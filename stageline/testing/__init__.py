"""What tests share: ranks on gloo, tiny models, tokenizers and processors made here."""
