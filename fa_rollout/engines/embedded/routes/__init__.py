"""SGLang's HTTP protocol: one file per group of routes, and what they read and answer."""
