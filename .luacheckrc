-- The store's functions: Lua 5.1 as the servers embed it. Each file is a module; `require` is our own.
stds.server = {read_globals = {'redis', 'cjson', 'cmsgpack', 'struct', 'bit', 'server'}}
std = 'lua51+server'
max_line_length = 125
