"""The HTTP door: routes, guards, request bodies, answers, the OpenAPI document."""
