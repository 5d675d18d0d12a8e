-- Removal: hand back the work of a worker that has died or leaves.
-- Keys:  shard base  :workers  zset   :worker:<id>:about|owned|mail   :dead  zset  conversation -> when it became a dead
-- letter

local actions = require('log/lua/actions')
local groups = require('log/lua/groups')
local marks = require('log/lua/marks')
local ownership = require('log/lua/ownership')
local store = require('store/prelude')
local wakeups = require('log/lua/wakeups')
local removal = {}

-- Move an entry of a dead worker to the end of its stream, unless its action or notification is settled, answered, or
-- carried by another entry.
local function give_entry_back(shard, stream, group, entry, fields)
  local about = store.pairs_of(fields)
  if not about['c'] or (group == groups.TOOLS and not about['a']) then
    local held = table.concat(fields, ' ', 1, math.min(#fields, 16))
    store.note_unreadable(shard, stream, entry, 'an entry without its fields', held)
    return
  end
  if about['x'] then
    redis.call('XADD', stream, '*', unpack(fields))
    return
  end
  local base, before = shard .. ':c:' .. about['c'], stream .. '|'
  local key, field = base .. ':once', 'q:' .. (about['a'] or '')
  if group == groups.CONTROLLERS then
    key, field = base .. ':meta', 'ready_id'
    before = wakeups.ready_place(shard, stream, '')
  end
  local carrier = store.get(key, field)
  if not carrier then return end
  if carrier ~= before .. entry then
    local other, its_entry = groups.place_in(carrier, group == groups.CONTROLLERS and shard .. ':ready' or stream)
    if groups.delivery_state(shard, other, group, its_entry) ~= 'lost' then return end
  end
  redis.call('HSET', key, field, before .. redis.call('XADD', stream, '*', unpack(fields)))
end

-- Give back the unacknowledged entries of a dead worker. Returns whether none are left.
function removal.give_back(shard, stream, group, worker, limit)
  if not groups.find(shard, stream, group) then return true end
  local pending = redis.call('XPENDING', stream, group, '-', '+', limit, worker)
  for _, item in ipairs(pending) do
    local found = redis.call('XRANGE', stream, item[1], item[1])
    if #found == 1 then
      store.attempt(shard, stream, item[1], give_entry_back, shard, stream, group, item[1], found[1][2])
    end
    redis.call('XACK', stream, group, item[1])
  end
  if #pending == limit then return false end
  redis.call('XGROUP', 'DELCONSUMER', stream, group, worker)
  return true
end

local function hand_back(shard, worker, cid, now, how)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if store.get(meta, 'owner') ~= worker then return end
  if how == 'crash' then
    local crashes = marks.count(shard .. ':c:' .. cid)
    redis.call('HSET', meta, 'orphan_of', worker)
    if crashes >= 3 then redis.call('ZADD', shard .. ':dead', now, cid) end
  end
  redis.call('HDEL', meta, 'owner')
  wakeups.notify_again(shard, meta, cid, now)
end

-- Hand back all work of a worker, at most `limit` items at a time. Returns whether it is done.
-- how  'crash': counts against its conversations, see marks.count. 'leave': does not.
--      A removal keeps its first `how`, even if another worker completes it.
function removal.remove(shard, worker, now, limit, how)
  local me = shard .. ':worker:' .. worker
  redis.call('ZADD', shard .. ':workers', 0, worker)
  store.is_there(shard, me .. ':about', 'hash')
  redis.call('HSETNX', me .. ':about', 'end', how)
  how = store.get(me .. ':about', 'end')
  local owned = redis.call('SPOP', ownership.owned_by(shard, worker), limit)
  table.sort(owned)  -- for deterministic simulations
  for _, cid in ipairs(owned) do
    store.attempt(shard, shard .. ':c:' .. cid .. ':meta', '', hand_back, shard, worker, cid, now, how)
  end
  if redis.call('SCARD', me .. ':owned') > 0 then return false end
  for _, ready in ipairs({':ready:interactive', ':ready'}) do
    if not removal.give_back(shard, shard .. ready, groups.CONTROLLERS, worker, limit) then return false end
  end
  for _, stream in ipairs(actions.streams_of(shard, worker)) do
    if not removal.give_back(shard, stream, groups.TOOLS, worker, limit) then return false end
  end
  redis.call('ZREM', shard .. ':workers', worker)
  redis.call('DEL', me .. ':mail', me .. ':about', me .. ':owned')
  return true
end

-- leave: a worker that stops hands back all its work, up to a thousand items per call.
-- KEYS shard base.  ARGV worker.  returns {'left'} {'leaving'}   leaving: call again
-- Conversations are handed back only for a caller that may count deaths: another one could acquit a suspect.
local function leave(keys, args)
  local owned = ownership.owned_by(keys[1], args[1])
  if redis.call('SCARD', owned) > 0 and not marks.may_count(keys[1]) then
    return redis.error_reply('NOPERM this user hands back no conversations')
  end
  if removal.remove(keys[1], args[1], store.now_ms(keys[1]), 1000, 'leave') then return {'left'} end
  return {'leaving'}
end

redis.register_function('deck_leave', leave)

return removal
