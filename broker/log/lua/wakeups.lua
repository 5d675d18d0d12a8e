-- Wake-ups: notify a conversation's owner, or any worker if it has none, that its log has grown.
-- Keys:  shard base         :ready :ready:interactive  streams  conversations without an owner
--                           :worker:<id>:mail          stream   conversations that the worker owns
--                           :unread                    zset     conversation -> time of its latest notification
--                           :parked                    zset     conversation -> when to wake it
--        conversation base  :meta  rung: an earlier notification is unanswered   ready_id: the entry of that notification

local groups = require('log/lua/groups')
local marks = require('log/lua/marks')
local store = require('store/prelude')
local turns = require('log/lua/turns')
local wakeups = {}

-- The name of an entry of a ready stream. In the usual stream it is the entry's id alone, as in older versions.
function wakeups.ready_place(shard, stream, entry)
  return stream == shard .. ':ready' and entry or stream .. '|' .. entry
end

-- The ready stream of a class. The interactive one exists once a worker that reads it has registered.
local function ready_stream(shard, class)
  local first = shard .. ':ready:interactive'
  if class == '0' and redis.call('EXISTS', first) == 1 then return first end
  return shard .. ':ready'
end

-- Put a conversation into the ready stream when its turn has come, unless it was claimed meanwhile.
function wakeups.hand_over_ready(shard, stream, cid)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if store.get(meta, 'ready_id') ~= wakeups.ready_place(shard, stream, turns.WAITING) then return false end
  redis.call('HSET', meta, 'ready_id', wakeups.ready_place(shard, stream, redis.call('XADD', stream, '*', 'c', cid)))
  return true
end

-- Notify the owner of new events by its mailbox, or any worker by the ready stream if there is no owner. Coalesced: nothing
-- is added while an earlier notification is unanswered (meta.rung).
function wakeups.notify_unless(notified, owner, shard, meta, cid, now)
  if notified then return end
  if owner then
    redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', 'c', cid)
    redis.call('HSET', meta, 'rung', '1')
  else
    local class, tenant = unpack(redis.call('HMGET', meta, 'class', 'tenant'))
    local stream = ready_stream(shard, class)
    local waits = turns.line_up(shard, stream, groups.CONTROLLERS, cid, class, tenant)
    local entry = waits and turns.WAITING or redis.call('XADD', stream, '*', 'c', cid)
    redis.call('HSET', meta, 'rung', '1', 'ready_id', wakeups.ready_place(shard, stream, entry))
    redis.call('ZADD', shard .. ':unread', now, cid)
    if waits then turns.pump(shard, stream, groups.CONTROLLERS, wakeups.hand_over_ready) end
  end
end

local function notify(shard, meta, cid, now)
  local found = redis.call('HMGET', meta, 'rung', 'owner')
  wakeups.notify_unless(found[1], found[2], shard, meta, cid, now)
end

function wakeups.notify_again(shard, meta, cid, now)
  redis.call('HDEL', meta, 'rung')
  notify(shard, meta, cid, now)
end

-- Notify the owner of an observation and send it along, so that the owner need not read it. This notification needs no
-- answer (meta.rung stays unchanged); later events have their own. `before` is the checksum of the event before it.
function wakeups.hand_to_owner(shard, base, owner, cid, id, bytes, before)
  local mail = {'c', cid, 'i', id, 'e', bytes, 'p', before}
  if redis.call('EXISTS', base .. ':watched') == 1 then
    mail[#mail + 1] = 'w'
    mail[#mail + 1] = '1'
  end
  redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', unpack(mail))
end

-- requeue: clear the crashes of a dead letter and notify its workers.  ARGV cid.  returns {'requeued'} {'missing'}
local function requeue(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not store.get(meta, 'last_id') then return {'missing'} end
  marks.clear(keys[1])
  redis.call('ZREM', shard .. ':dead', cid)
  wakeups.notify_again(shard, meta, cid, store.now_ms(shard))
  return {'requeued'}
end

-- wake: notify a conversation without new events, because a resource that it waits for is available.  ARGV cid.
-- returns {'rung'} {'missing'}
local function wake(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not store.get(meta, 'last_id') then return {'missing'} end
  notify(shard, meta, cid, store.now_ms(shard))
  return {'rung'}
end

function wakeups.wake_parked(shard, cid, now)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if store.get(meta, 'last_id') then wakeups.notify_again(shard, meta, cid, now) end
end

-- Check an unanswered notification. Returns 'rung' if it was lost and is repeated, otherwise 'seen'.
function wakeups.check_notification(shard, cid, now)
  local meta = shard .. ':c:' .. cid .. ':meta'
  local stream, entry = groups.place_in(store.get(meta, 'ready_id') or '', shard .. ':ready')
  if store.get(meta, 'owner') or not store.get(meta, 'last_id') then
    redis.call('ZREM', shard .. ':unread', cid)
    return 'seen'
  end
  local is_waiting = entry == turns.WAITING and turns.is_in_line(shard, stream, cid)
  if is_waiting or groups.delivery_state(shard, stream, groups.CONTROLLERS, entry) == 'queued' then
    redis.call('ZADD', shard .. ':unread', now, cid)
    return 'seen'
  end
  -- Lost, or delivered and not answered: the reply that delivered it may have been lost.
  if groups.id_parts(entry) then redis.call('XACK', stream, groups.CONTROLLERS, entry) end
  wakeups.notify_again(shard, meta, cid, now)
  return 'rung'
end

redis.register_function('deck_requeue', requeue)
redis.register_function('deck_wake', wake)

return wakeups
