"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import fedbilevel as fb

# %% ConfigurationError
try:
    fb.SimFBO(local_steps=0)
except fb.errors.ConfigurationError as error:
    print(error.path, error.got, error.allowed)
