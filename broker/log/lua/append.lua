-- Append: the only way into a log.
-- Keys:  conversation base  :events  stream   :meta  hash  what `ls` shows, and who waits for what
--                           :once    hash  'create:<key>', 'p:<key>', 'o:<action>' -> '<first>:<last>' of an append
--        shard base         :index   zset  conversation -> created (ms)   :awaited :expiring :parked :dead  zsets
--                           :notices stream   and those of wakeups, actions, admission, labels and webhooks
-- Holds: an append is made once, wholly or not at all; a former owner's is refused by its token.

local actions = require('log/lua/actions')
local admission = require('log/lua/admission')
local conversations = require('log/lua/conversations')
local history = require('log/lua/history')
local labels = require('log/lua/labels')
local secrets = require('log/lua/secrets')
local store = require('store/prelude')
local wakeups = require('log/lua/wakeups')
local webhooks = require('log/lua/webhooks')

local MOST_CARRIED_BYTES = 16384  -- of an observation that reaches the owner with its notification

-- What a conversation is created with and keeps: no later append changes whose it is.
local FIXED = {class = true, tenant = true, open_in = true}

-- The value of one of the fields that `append` is given, as {name, value, …}.
local function given(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
  return nil
end

-- Note when a conversation that is created may begin, given as {delay_ms = from now, limit_ms = until it expires},
-- either of them nil. Returns whether it has to wait.
local function plan_start(shard, meta, cid, now, wall, start)
  local delay, limit = start.delay_ms, start.limit_ms
  redis.call('HSET', meta, 'planned', 'waiting')
  if limit then
    redis.call('HSET', meta, 'expires_ms', now + limit)
    redis.call('ZADD', shard .. ':expiring', now + limit, cid)
  end
  if not delay then return false end
  redis.call('HSET', meta, 'due_ms', now + delay, 'not_before_ms', wall + delay, 'wait_reason', 'scheduled')
  redis.call('ZADD', shard .. ':parked', now + delay, cid)
  return true
end

-- What is read of the conversation, at once: a call into the server costs more than the work it does here.
local READ = {'last_id', 'closed', 'node', 'owner', 'token', 'rung', 'append_key', 'append_ids', 'crashes', 'mark',
  'awaited', 'noticed', 'open_in', 'created_ms', 'double_texting', 'busy', 'planned', 'tenant'}

-- One append: its keys, what the call says, the times, and what the conversation has: `is`, by the names of READ.
-- Its steps add `open_in` and `whole` (see admission.decide), `created`, `must_wait`, `once_key`, `first` and `last`.
local function start(keys, args)
  local base, shard, call = keys[1], keys[2], cmsgpack.unpack(args[2])
  local meta = base .. ':meta'
  local now, wall, hooked = store.times_ms(shard)
  local values, is = redis.call('HMGET', meta, unpack(READ)), {}
  for at, name in ipairs(READ) do is[name] = values[at] or nil end
  return {base = base, shard = shard, meta = meta, once = base .. ':once', cid = args[1], args = args, call = call,
    by = call.by, condition = call.condition or '', fields = call.fields or {}, now = now, wall = wall, hooked = hooked,
    is = is, last = tonumber(is.last_id), open_in = is.open_in, created = is.created_ms, must_wait = call.quiet}
end

-- Acknowledge the action's entry that a tool worker answers.
local function acknowledge(a)
  if a.call.place then actions.acknowledge(a.call.place) end
end

-- Whether a producer's append is refused: the conversation is at work and takes no message then, or it need not expire
-- any more.
local function is_refused(a)
  if a.condition == 'expire' then return a.is.planned ~= 'waiting' end
  local policy = string.match(a.condition, '^message:(.*)$')
  if not policy then return false end
  return (policy ~= '' and policy or a.is.double_texting) == 'reject' and a.is.busy == '1'
end

-- By who appends: the reply if nothing is to be written; nil otherwise.
local check = {}

function check.create(a)
  a.once_key = 'create:' .. a.call.key
  if a.last then
    local range = store.get(a.once, a.once_key)
    return range and history.duplicate(range) or {'exists'}
  end
  if a.call.inner then return nil end
  local refusal
  refusal, a.open_in, a.whole = admission.decide(a.shard, given(a.fields, 'tenant') or '', a.call.elsewhere, a.now)
  return refusal or a.is.closed and {'closed'}
end

function check.owner(a)
  local call, is = a.call, a.is
  if not a.last then return {'missing'} end
  if is.owner ~= call.worker or is.token ~= call.token then return {'fenced'} end
  a.this_call = call.token .. ':' .. call.seen .. ':' .. call.key .. call.checksum
  if is.append_key == a.this_call then return history.duplicate(is.append_ids) end
  if not history.remembers(a.base, call.seen, call.checksum) then return {'lost', a.last} end
  if tonumber(call.seen) ~= a.last then return {'conflict', a.last} end
  return is.closed and {'closed'}
end

function check.tool(a)
  local reply
  if not a.last then return {'missing'} end
  if not history.remembers(a.base, a.call.action, a.call.checksum) then
    reply = {'lost', a.last}
  else
    local range = store.get(a.once, 'o:' .. a.call.action)
    reply = range and history.duplicate(range) or a.is.closed and {'closed'}
  end
  if reply then acknowledge(a) end
  return reply
end

function check.producer(a)
  if not a.last then return {'missing'} end
  a.once_key = 'p:' .. a.call.key
  local range = store.get(a.once, a.once_key)
  if range then return history.duplicate(range) end
  if a.is.closed then return {'closed'} end
  if is_refused(a) then return {'busy'} end
  return a.call.seen and tonumber(a.call.seen) ~= a.last and {'conflict', a.last}
end

local function create(a)
  local call, meta, shard, cid, wall = a.call, a.meta, a.shard, a.cid, a.wall
  if not call.inner then
    a.created = wall
    redis.call('HSET', meta, 'open_in', a.open_in)
    admission.count_open(shard, a.open_in, cid, given(a.fields, 'state'), wall)
    if a.whole then redis.call('HSET', shard .. ':paces', a.open_in, string.format('%.0f', a.whole)) end
  end
  a.last = 0
  redis.call('HSET', meta, 'created_ms', wall, 'pool', call.pool)
  redis.call('ZADD', shard .. ':index', wall, cid)
  if call.awaited then
    redis.call('HSET', meta, 'awaited', call.awaited)
    redis.call('ZADD', shard .. ':awaited', a.now + conversations.FIRST_LOOK_MS, cid)
  end
  a.must_wait = call.start and plan_start(shard, meta, cid, a.now, wall, call.start)
end

-- The fields that an append writes, and whether the labels are among them. Counts whether the conversation is open.
local function fields_of(a)
  local relabels, update = false, {'updated_ms', a.wall}
  for at = 1, #a.fields, 2 do
    local name, value = a.fields[at], a.fields[at + 1]
    if a.by == 'create' or not FIXED[name] then
      update[#update + 1] = name
      update[#update + 1] = value
      relabels = relabels or name == 'label_index'
    end
    if a.by ~= 'create' and a.open_in and name == 'state' then
      admission.count_open(a.shard, a.open_in, a.cid, value, a.created or a.wall)
    end
  end
  return update, relabels
end

local function cancel_actions(a)
  if not (a.is.node and a.call.cancels) then return end
  for _, action in ipairs(a.call.cancels) do
    local order = action == '0' and 'close' or 'cancel'
    redis.call('XADD', a.shard .. ':act:node:' .. a.is.node, '*', 'c', a.cid, 'a', action, 'x', order)
  end
end

local function write_events(a)
  local events, once, last = a.base .. ':events', a.once, a.last
  a.first = last + 1
  for at, event in ipairs(a.call.events) do
    local bytes, dispatch, answers = a.args[at + 2], event.dispatch, event.answers
    last = last + 1
    redis.call('XADD', events, last .. '-0', 'e', bytes)
    if dispatch then
      actions.enqueue(a.shard, a.meta, once, a.cid, last, bytes, dispatch ~= '1' and dispatch or nil)
    end
    if answers then
      redis.call('HSET', once, 'o:' .. answers, last .. ':' .. last)
      redis.call('HDEL', once, 'q:' .. answers, 'w:' .. answers, 'n:' .. answers, 'm:' .. answers)
    end
  end
  a.last = last
end

-- Write the fields, with what tells a repetition of this append; a tool's is told by the action that it answers.
local function write_fields(a, update, relabels)
  local by, ids, created = a.by, a.first .. ':' .. a.last, a.created or a.wall
  update[#update + 1] = 'last_id'
  update[#update + 1] = a.last
  if by == 'owner' then
    -- An append without events leaves the last id where it was: it must not pass for the append that moves it.
    if a.last >= a.first then
      for _, value in ipairs({'append_key', a.this_call, 'append_ids', ids}) do update[#update + 1] = value end
    end
  elseif by ~= 'tool' then
    redis.call('HSET', a.once, a.once_key, ids)
    redis.call('ZREM', a.shard .. ':dead', a.cid)
    -- Until its owner says otherwise; a message to a conversation that has not begun belongs to its task.
    if a.is.planned ~= 'waiting' and string.find(a.condition, '^message:') then
      redis.call('HSET', a.meta, 'busy', '1')
    end
  end
  if relabels and by ~= 'create' then labels.leave(a.shard, a.meta, a.cid) end
  redis.call('HSET', a.meta, unpack(update))
  if relabels or by == 'create' then labels.enter(a.shard, a.meta, a.cid, created) end
  if by == 'owner' and (a.is.crashes or a.is.mark) then redis.call('HDEL', a.meta, 'crashes', 'mark') end
end

-- Leave word for the doors and for webhooks, and wait for no time any more once it has expired.
local function leave_word(a)
  if a.is.awaited and not a.is.noticed and (a.by == 'owner' or a.condition == 'expire') then
    redis.call('XADD', a.shard .. ':notices', '*', 'c', a.cid)
    redis.call('HSET', a.meta, 'noticed', '1')
  end
  if a.hooked and a.last >= a.first then
    local tenant = a.by == 'create' and given(a.fields, 'tenant') or a.is.tenant
    webhooks.add_news(a.shard, a.cid, tenant, a.first)
  end
  if a.condition == 'expire' then
    redis.call('ZREM', a.shard .. ':expiring', a.cid)
    redis.call('ZREM', a.shard .. ':parked', a.cid)
  end
end

-- Notify who decides next, unless it is the one who appends.
local function notify(a)
  if a.by == 'owner' then return end
  local is, call, bytes = a.is, a.call, a.args[3]
  acknowledge(a)
  if a.by == 'tool' and is.owner and not is.rung and a.first == a.last and #bytes <= MOST_CARRIED_BYTES then
    local is_behind_action = tostring(a.last - 1) == call.action and call.checksum ~= ''
    local before = is_behind_action and call.checksum or history.checksum_of(a.base, a.last - 1)
    wakeups.hand_to_owner(a.shard, a.base, is.owner, a.cid, a.last, bytes, before or '')
  elseif not a.must_wait and a.condition ~= 'expire' then
    wakeups.notify_unless(is.rung, is.owner, a.shard, a.meta, a.cid, a.now)
  end
end

-- append: the only way into a log.
-- KEYS  conversation base, shard base
-- ARGV  cid, the arguments below in a map of MessagePack, the bytes of each event …
--   by 'create'    key, pool   the conversation must not exist
--                  awaited: who waits for its end, or nil
--                  inner: it is part of another one's step, and neither refused nor counted; else elsewhere: how many
--                  conversations of the tenant are open in other shards, see admission.lua
--                  start: when it may begin, see plan_start, or nil
--   by 'producer'  key
--                  quiet: notify nobody
--                  condition 'message:<policy>': a person's message, refused while the agent works if the policy, by
--                  default the conversation's, is 'reject'; 'expire': refused unless the conversation waits to begin
--                  seen: the event that has to be the last one, or nil
--   by 'tool'      worker, action, checksum of the action, see history.remembers
--                  place: '<stream>|<entry>' to acknowledge, or nil
--   by 'owner'     worker, token
--                  seen, checksum: of the last event the decision rests on
--                  key: of this very call, the same when it is repeated
--   events   for each one: dispatch '1': a runnable action to put on its action stream; 'pool:<name>': on that pool's
--            answers: the action that an observation settles
--   fields   what `ls` shows: {name, value, …}; or nil
--   cancels  running actions to be stopped; '0': all programs of the workspace; or nil
--   secrets  how many values of the conversation the writer knows and hides; nil: it has looked them up
--   sample   one of these values, as it is encrypted
-- What an owner appends to a conversation that is waited for leaves one notice for the doors (meta.noticed until read).
-- returns  {'appended', first, last} {'duplicate', first, last} {'fenced'} {'conflict', last} {'closed'} {'missing'}
--          {'exists'} {'busy'} {'lost', last}: the log does not hold what the writer remembers
--          {'secrets'}: there are values that the writer does not know; nothing was written
--          {'refused', 'memory' | 'open' | 'pace', tenant, how much there is, how much may be, when to try again in ms}
local function append(keys, args)
  local a = start(keys, args)
  if a.call.secrets and not secrets.are_known(a.base, a.call.secrets, a.call.sample) then return {'secrets'} end
  local reply = check[a.by](a)
  if reply then return reply end
  if a.by == 'create' then create(a) end
  local update, relabels = fields_of(a)
  cancel_actions(a)
  write_events(a)
  write_fields(a, update, relabels)
  leave_word(a)
  notify(a)
  return {'appended', a.first, a.last}
end

redis.register_function('deck_append', append)
