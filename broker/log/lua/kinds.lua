-- Kinds: the type of each key of a shard. A key of another type is moved away.
-- Keys: all of a shard, by name; see store.is_there.

local store = require('store/prelude')
local kinds = {}

-- The keys of a shard that all workers need.
local KINDS = {ready = 'stream', takeovers = 'stream', unreadable = 'stream', unread = 'zset', parked = 'zset',
  workers = 'zset', index = 'zset', dead = 'zset', nodes = 'zset', clock = 'hash', notices = 'stream', awaited = 'zset',
  ['ready:interactive'] = 'stream', tenants = 'hash', paces = 'hash', expiring = 'zset', hooked = 'hash', news = 'zset',
  refused = 'hash', ended = 'stream'}

-- Further keys of the first shard for ingress workers; users of other roles may not reach them.
local FIRST_SHARD, KINDS_OF_THE_FIRST = 'deck:{0}', {revoked = 'zset'}

function kinds.keep(shard)
  for name, kind in pairs(KINDS) do store.is_there(shard, shard .. ':' .. name, kind) end
end

function kinds.keep_of_role(shard, role)
  if role ~= 'ingress' or shard ~= FIRST_SHARD then return end
  for name, kind in pairs(KINDS_OF_THE_FIRST) do store.is_there(shard, shard .. ':' .. name, kind) end
end

-- keep_kind: move a key of another type away, see is_there.
-- KEYS key; if it is of a shard, the base of that, which records it.  ARGV kind.
-- returns {'there'} {'absent'} {'moved', why: the caller records it}
local function keep_kind(keys, args)
  local is_there, why = store.is_there(keys[2], keys[1], args[1])
  if why and not keys[2] then return {'moved', why} end
  return {is_there and 'there' or 'absent'}
end

redis.register_function('deck_keep_kind', keep_kind)

return kinds
