-- Shards: raising their number. A conversation stays in the shard in which it was created.
-- Keys:  deck:store  hash  shards -> every number of shards there has been, '1,4'
--        shard base  :layout  hash  shards -> the least number that a process must know to create a conversation here;
--                                   tool workers can neither read nor write it

local store = require('store/prelude')
local shards = {}

-- Whether a process that knows so many shards may not create a conversation here any more: after the number was raised, the
-- conversation may exist in a newer shard.
function shards.is_outdated(shard, known)
  local layout = shard .. ':layout'
  local least = store.is_there(shard, layout, 'hash') and store.number_of(store.get(layout, 'shards'))
  return least and (tonumber(known) or 1) < least or false
end

-- place: whether this shard of an earlier number has a conversation. If it has not, no process that knows fewer shards can
-- create it here any more.
-- KEYS shard base.  ARGV cid, number of shards that the caller knows.  returns {'here'} {'elsewhere'}
local function place(keys, args)
  local shard, known = keys[1], tonumber(args[2])
  if store.get(shard .. ':c:' .. args[1] .. ':meta', 'last_id') then return {'here'} end
  if not shards.is_outdated(shard, known) then redis.call('HSET', shard .. ':layout', 'shards', known) end
  return {'elsewhere'}
end

-- raise_shards: replace the numbers of shards, unless they have changed since the caller read them.
-- KEYS deck:store.  ARGV the numbers that it read, the new ones.  returns {'raised'} {'changed'}
local function raise_shards(keys, args)
  if store.get(keys[1], 'shards') ~= args[1] then return {'changed'} end
  redis.call('HSET', keys[1], 'shards', args[2])
  return {'raised'}
end

redis.register_function('deck_place', place)
redis.register_function('deck_raise_shards', raise_shards)

return shards
