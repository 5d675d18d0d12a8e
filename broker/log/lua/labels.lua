-- Labels: the indexes of a conversation.
-- Keys:  shard base  :label:<name>=<value>  zset  conversation -> created (ms)   :label:=<tenant>  the same, of a tenant

local store = require('store/prelude')
local labels = {}

-- The keys of a conversation's indexes: of its labels, '<name>=<value> …' in meta.label_index, and of its tenant, which is
-- indexed as a label without a name.
local function keys_of(shard, meta)
  local tenant, index = unpack(redis.call('HMGET', meta, 'tenant', 'label_index'))
  local found = tenant and {shard .. ':label:=' .. tenant} or {}
  for label in string.gmatch(index or '', '%S+') do found[#found + 1] = shard .. ':label:' .. label end
  return found
end

function labels.enter(shard, meta, cid, created)
  for _, key in ipairs(keys_of(shard, meta)) do
    store.is_there(shard, key, 'zset')
    redis.call('ZADD', key, created, cid)
  end
end

function labels.leave(shard, meta, cid)
  for _, key in ipairs(keys_of(shard, meta)) do
    if store.is_there(shard, key, 'zset') then redis.call('ZREM', key, cid) end
  end
end

return labels
