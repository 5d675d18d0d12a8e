-- Consumer groups: create them, and find out whether an entry is queued, delivered to a live worker, or lost.
-- Keys: any stream of a shard.

local store = require('store/prelude')
local groups = {}

-- The server's description of a consumer group; nil if there is none.
function groups.find(shard, stream, name)
  if not store.is_there(shard, stream, 'stream') then return nil end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = store.pairs_of(flat)
    if group['name'] == name then return group end
  end
  return nil
end

groups.CONTROLLERS, groups.TOOLS, groups.INGRESSES = 'controllers', 'tools', 'ingresses'

-- Create a group unless it exists. Returns its description.
function groups.make(shard, stream, name)
  local found = groups.find(shard, stream, name)
  if not found then redis.call('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM') end
  return found or {['last-delivered-id'] = '0-0', pending = 0}
end

function groups.id_parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

-- Parse an entry's location: '<stream>|<entry>', or '<entry>' alone in the usual stream.
function groups.place_in(text, usual)
  local stream, entry = string.match(text, '^(.*)|(.*)$')
  return stream or usual, entry or text
end

local function id_after(a, b)
  local a_ms, a_seq = groups.id_parts(a)
  local b_ms, b_seq = groups.id_parts(b)
  if a_ms ~= b_ms then return a_ms > b_ms end
  return a_seq > b_seq
end

-- The state of an entry in a group: not delivered yet ('queued'), delivered to a live worker ('delivered'), or neither
-- ('lost').
function groups.delivery_state(shard, stream, group, entry)
  if not groups.id_parts(entry) or redis.call('EXISTS', stream) == 0 then return 'lost' end
  if #redis.call('XRANGE', stream, entry, entry) == 0 then return 'lost' end
  local found = groups.find(shard, stream, group)
  if not found or id_after(entry, found['last-delivered-id']) then return 'queued' end
  local pending = redis.call('XPENDING', stream, group, entry, entry, 1)
  if #pending == 1 and store.alive(shard, pending[1][2]) then return 'delivered' end
  return 'lost'
end

return groups
