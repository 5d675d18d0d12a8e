-- Kinds: the type that each key of a shard has. A key of another type is moved out of the way.
-- Keys: all of a shard, by name; see store.is_there.

local store = require('store/prelude')
local kinds = {}

-- What everybody needs of a shard: a key of another type among these is moved out of the way.
local KINDS = {ready = 'stream', takeovers = 'stream', unreadable = 'stream', unread = 'zset', parked = 'zset',
  workers = 'zset', index = 'zset', dead = 'zset', nodes = 'zset', clock = 'hash', notices = 'stream', awaited = 'zset',
  ['ready:interactive'] = 'stream', tenants = 'hash', paces = 'hash', expiring = 'zset', hooked = 'hash', news = 'zset',
  refused = 'hash'}

-- And what doors need of the first one; users of other roles may not reach it.
local FIRST_SHARD, KINDS_OF_THE_FIRST = 'deck:{0}', {revoked = 'zset'}

function kinds.keep(shard)
  for name, kind in pairs(KINDS) do store.is_there(shard, shard .. ':' .. name, kind) end
end

function kinds.keep_of_role(shard, role)
  if role ~= 'door' or shard ~= FIRST_SHARD then return end
  for name, kind in pairs(KINDS_OF_THE_FIRST) do store.is_there(shard, shard .. ':' .. name, kind) end
end

-- keep_kind: move a key out of the way that is of another kind, see is_there.
-- KEYS key, base of the shard where it is noted.  ARGV kind.  returns {'there'} {'absent'}
local function keep_kind(keys, args)
  return {store.is_there(keys[2], keys[1], args[1]) and 'there' or 'absent'}
end

redis.register_function('deck_keep_kind', keep_kind)

return kinds
