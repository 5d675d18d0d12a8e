-- Budgets: what a call may cost at worst is reserved before it, what it did cost is charged after it.
--
-- Every function takes KEYS shard base ('deck:{0}') and derives the real keys from it:
--   :budget:<account>    hash  limit, spent, reserved, lost, lost_calls, calls, own, parent, change, deleted
--   :budget:<account>:children|waiting|wanted     :budgets    :ledger:held|lost|swept|crowded    :workers
-- An account is 'conversation:<id>', 'experiment:<tenant>/<name>' or 'tenant:<name>'; each has at most one parent, and
-- what is spent in one counts in all above it. Amounts are nano-USD: whole numbers, so that sums are exact.
--
-- A conversation is charged by the sum of its whole log, so a repeated or a late charge adds nothing. `own` is that sum;
-- `spent` counts its delegates too. What was reserved for a call whose worker died, or whose reply was cut off, is
-- `lost`: the provider may bill it, so it counts against the limit, but it is not `spent`. What is reserved for a call
-- that is on its way through a batch of the provider's is nobody's: its worker is '-', and it ends with the reply.
-- The account of a conversation goes with it, or, if it has a limit, delegates or a call under way then, with the last of
-- these: until then it is `deleted`, and for a day after that, because a repeated charge would charge all of it again.
--
-- Who waits for an account is served in the order in which it came, and later ones stand behind it: nobody
-- overtakes, not even a smaller call, or a large one would wait for ever. Room that is there is kept for whom it woke,
-- but not for long: somebody that was woken and does not come keeps its place for a while and holds nobody up.

local fair_queue = require('limits/fair_queue')
local store = require('store/prelude')

local SWEEP_MS, MAX_DEPTH = 500, 24
local CHANGES_CHARS = 1000     -- how much is remembered of the keys of the latest changes of a limit
local DELETED_MS = 86400000

local function budget(shard, account) return shard .. ':budget:' .. account end

local function number(key, field) return tonumber(store.get(key, field)) or 0 end

local function add(shard, chain, field, amount)
  if amount == 0 then return end
  for _, account in ipairs(chain) do
    local key, change = budget(shard, account), string.format('%.0f', amount)
    local answer = redis.pcall('HINCRBY', key, field, change)
    local text = type(answer) == 'table' and answer.err or ''
    if string.find(text, 'not an integer', 1, true) or string.find(text, 'overflow', 1, true) then
      store.note_unreadable(shard, key, field, 'not a whole number', store.get(key, field))
      redis.call('HSET', key, field, change)
    elseif type(answer) == 'table' then error(answer) end
  end
end

-- An account and all above it.
local function chain_of(shard, account)
  local chain = {}
  while account and #chain < MAX_DEPTH do
    chain[#chain + 1] = account
    account = store.get(budget(shard, account), 'parent')
  end
  return chain
end

-- Make the accounts known, each as a child of the next.
local function enroll(shard, accounts)
  for i, account in ipairs(accounts) do
    if redis.call('EXISTS', budget(shard, account)) == 0 then redis.call('HSET', budget(shard, account), 'spent', 0) end
    local parent = accounts[i + 1]
    if parent and redis.call('HSETNX', budget(shard, account), 'parent', parent) == 1 then
      redis.call('SADD', budget(shard, parent) .. ':children', account)
    end
    if string.sub(account, 1, 13) ~= 'conversation:' then redis.call('SADD', shard .. ':budgets', account) end
  end
end

local function accounts_from(args, first)
  local accounts = {}
  for i = first, #args do accounts[#accounts + 1] = args[i] end
  return accounts
end

-- held, lost: '<amount> <worker> <token> <account>'
local function reserved_for(shard, cid, where)
  local text = store.get(shard .. ':ledger:' .. where, cid)
  if not text then return nil end
  local amount, worker, token, account = string.match(text, '^(%S+) (%S+) (%S+) (.+)$')
  if not (tonumber(amount) and tonumber(token)) then
    redis.call('HDEL', shard .. ':ledger:' .. where, cid)
    store.note_unreadable(shard, shard .. ':ledger:' .. where, cid, 'not what is written for a call', text)
    return nil
  end
  return {amount = tonumber(amount), worker = worker, token = tonumber(token), account = account, text = text}
end

local function give_back(shard, cid, held)
  redis.call('HDEL', shard .. ':ledger:held', cid)
  add(shard, chain_of(shard, held.account), 'reserved', -held.amount)
end

-- Let the account of a conversation that was deleted expire once nothing keeps it, and those above it that it has kept.
-- Who deletes conversations may have no right to accounts of other kinds.
local function drop_deleted(shard, account)
  for _ = 1, MAX_DEPTH do
    local key, cid = budget(shard, account), string.match(account, '^conversation:(.*)$')
    if not cid then return end
    local parent, limit, deleted = unpack(redis.call('HMGET', key, 'parent', 'limit', 'deleted'))
    if limit or not deleted or redis.call('HEXISTS', shard .. ':ledger:held', cid) == 1
      or redis.call('SCARD', key .. ':children') > 0 then return end
    redis.call('HDEL', shard .. ':ledger:lost', cid)
    redis.call('DEL', key .. ':children', key .. ':waiting', key .. ':wanted')
    redis.call('PEXPIRE', key, DELETED_MS)
    if not parent then return end
    redis.call('SREM', budget(shard, parent) .. ':children', account)
    account = parent
  end
end

local function lose(shard, cid, held)
  give_back(shard, cid, held)
  local chain = chain_of(shard, held.account)
  add(shard, chain, 'lost', held.amount)
  add(shard, chain, 'lost_calls', 1)
  redis.call('HSET', shard .. ':ledger:lost', cid, held.text)
  drop_deleted(shard, held.account)
end

-- Begin the account of a conversation again whose id a deleted one had.
local function begin_again(shard, cid, account, token)
  local key = budget(shard, account)
  if not store.get(key, 'deleted') then return end
  local held = reserved_for(shard, cid, 'held')
  if held and held.token >= token then return end  -- the deleted one's owner asks again
  if held then lose(shard, cid, held) end
  redis.call('HDEL', shard .. ':ledger:lost', cid)
  if not store.get(key, 'limit') and redis.call('SCARD', key .. ':children') == 0 then
    redis.call('DEL', key)
    return
  end
  redis.call('HDEL', key, 'deleted')
  redis.call('PERSIST', key)
  redis.call('HSET', key, 'own', 0)
  local parent = store.get(key, 'parent')
  if parent then redis.call('SADD', budget(shard, parent) .. ':children', account) end
end

-- Charge what the log of a conversation has come to. A reply that is in the log after all was not lost. An older token
-- than the caller's is a former owner's: its call is over.
local function charge(shard, cid, account, token, total)
  local chain = chain_of(shard, account)
  local delta = total - number(budget(shard, account), 'own')
  local has_new_events = delta > 0
  if has_new_events then
    redis.call('HSET', budget(shard, account), 'own', string.format('%.0f', total))
    add(shard, chain, 'spent', delta)
    add(shard, chain, 'calls', 1)
  end
  local lost = reserved_for(shard, cid, 'lost')
  if lost then
    redis.call('HDEL', shard .. ':ledger:lost', cid)
    if has_new_events then
      add(shard, chain_of(shard, lost.account), 'lost', -lost.amount)
      add(shard, chain_of(shard, lost.account), 'lost_calls', -1)
    end
  end
  local held = reserved_for(shard, cid, 'held')
  if held and held.worker == '-' then
    if has_new_events then give_back(shard, cid, held) end
  elseif held and held.token < token then
    if has_new_events then give_back(shard, cid, held) else lose(shard, cid, held) end
    redis.call('HDEL', shard .. ':ledger:lost', cid)
  end
end

-- What an account has left, as it stands. nil without a limit.
local function room_of(shard, account)
  local key = budget(shard, account)
  local limit = store.get(key, 'limit')
  if not limit then return nil end
  limit = tonumber(limit) or 0  -- a limit that is not a number lets nothing pass
  local reserved = number(key, 'reserved')
  return {limit = limit, reserved = reserved, committed = number(key, 'spent') + number(key, 'lost') + reserved}
end

-- Whether there is room for an amount. The last call may pass the limit, if it is the only one under way.
local function fits(room, amount)
  if not room then return true end
  if room.committed >= room.limit then return false end
  return room.committed + amount <= room.limit or room.reserved == 0
end

local function set_aside(room, amount)
  if not room then return end
  room.reserved, room.committed = room.reserved + amount, room.committed + amount
end

-- wanted: conversation → '<amount> <when it was last woken> <how often>'
local function waiter_of(key, cid)
  local amount, at, wakes = string.match(store.get(key .. ':wanted', cid) or '', '^(%S+) (%S+) (%d+)$')
  if not (tonumber(amount) and tonumber(at)) then return nil end
  return {amount = tonumber(amount), at = tonumber(at), wakes = tonumber(wakes) or 0}
end

local function note(key, cid, waiter)
  redis.call('HSET', key .. ':wanted', cid, string.format('%.0f %.0f %d', waiter.amount, waiter.at, waiter.wakes))
end

local function leave(key, cid)
  fair_queue.leave(key .. ':waiting', cid)
  redis.call('HDEL', key .. ':wanted', cid)
end

-- Go through those who wait for an account, in order, and set aside what they are to have.
-- Returns who may call now, whether the end of the queue was reached, and what is left then (nil without a limit).
local function served(shard, account, now)
  local key, room, turn = budget(shard, account), room_of(shard, account), {}
  local waiting, is_whole = fair_queue.scan(key .. ':waiting')
  for _, cid in ipairs(waiting) do
    local waiter = waiter_of(key, cid)
    if not waiter then leave(key, cid) end  -- it asks again, if it is one
    waiter = waiter or {amount = 0, at = now, wakes = 2}
    local is_late = waiter.wakes > 1 or (waiter.wakes == 1 and now - waiter.at >= fair_queue.PATIENCE_MS)
    if fits(room, waiter.amount) then
      turn[#turn + 1] = cid
      turn[cid] = true
      if not is_late then set_aside(room, waiter.amount) end
    elseif not is_late then
      return turn, false
    end
  end
  return turn, is_whole, room
end

-- Since when a conversation waits for one of these accounts; nil when it does not.
local function waits_since(shard, chain, cid)
  for _, account in ipairs(chain) do
    local since = fair_queue.place_in(budget(shard, account) .. ':waiting', cid)
    if since then return since end
  end
  return nil
end

local function stand(shard, account, cid, amount, since)
  local key = budget(shard, account)
  fair_queue.join(key .. ':waiting', cid, since)
  redis.call('SADD', shard .. ':ledger:crowded', account)
  note(key, cid, {amount = amount, at = 0, wakes = 0})
end

-- Whether it is the turn of this conversation in an account; of one that has waited for another account by its time.
local function may_spend(shard, account, cid, amount, since, now)
  if since then
    stand(shard, account, cid, amount, since)
    local turn = served(shard, account, now)
    return turn[cid] or false
  end
  if redis.call('ZCARD', budget(shard, account) .. ':waiting') == 0 then return fits(room_of(shard, account), amount) end
  local _, is_open, left = served(shard, account, now)
  return is_open and fits(left, amount)
end

local function stop_waiting(shard, chain, cid)
  for _, account in ipairs(chain) do leave(budget(shard, account), cid) end
end

-- Wake those whose turn it is in one of these accounts, unless they were woken a moment ago.
local function wake_of(shard, account, now, woken)
  local key = budget(shard, account)
  for _, cid in ipairs(served(shard, account, now)) do
    local waiter = waiter_of(key, cid)
    if waiter and (waiter.wakes == 0 or now - waiter.at >= fair_queue.PATIENCE_MS) then
      if waiter.wakes >= fair_queue.MAX_WAKES then
        leave(key, cid)
      else
        waiter.at, waiter.wakes = now, waiter.wakes + 1
        note(key, cid, waiter)
        woken[#woken + 1] = cid
      end
    end
  end
  if redis.call('ZCARD', key .. ':waiting') == 0 then redis.call('SREM', shard .. ':ledger:crowded', account) end
end

local function wake(shard, chain, now)
  local woken = {}
  for _, account in ipairs(chain) do
    store.attempt(shard, budget(shard, account), '', wake_of, shard, account, now, woken)
  end
  return woken
end

local function extend(list, others)
  for _, other in ipairs(others) do list[#list + 1] = other end
  return list
end

-- What dead workers had reserved is lost, not blocked; and whom somebody kept waiting that does not come is woken.
local function sweep(shard, now)
  local swept = tonumber(redis.call('GET', shard .. ':ledger:swept') or 0) or 0
  if now - swept < SWEEP_MS then return {} end
  redis.call('SET', shard .. ':ledger:swept', string.format('%.0f', now))
  local is_alive, flat = {['-'] = true}, redis.call('HGETALL', shard .. ':ledger:held')
  for i = 1, #flat, 2 do
    local held = reserved_for(shard, flat[i], 'held')
    if held then
      if is_alive[held.worker] == nil then is_alive[held.worker] = store.alive(shard, held.worker) end
      -- Nobody takes the reply of a call that is in a batch once its conversation is deleted.
      local is_over = held.worker == '-' and redis.pcall('HEXISTS', budget(shard, held.account), 'deleted') == 1
      if is_over or not is_alive[held.worker] then
        store.attempt(shard, shard .. ':ledger:held', flat[i], lose, shard, flat[i], held)
        redis.call('HDEL', shard .. ':ledger:held', flat[i])
      end
    end
  end
  return wake(shard, redis.call('SMEMBERS', shard .. ':ledger:crowded'), now)
end

local function reply(outcome, detail, woken)
  local answer = {outcome, detail}
  for _, cid in ipairs(woken) do answer[#answer + 1] = cid end
  return answer
end

-- deck_budget_reserve: may this conversation spend so much? If not, it is woken when there is room.
-- ARGV cid, worker, token, amount, sum of its log, account, parent account …
-- returns {'reserved', '', woken …} {'exhausted', account, woken …} {'fenced', '', woken …}
local function reserve(keys, args)
  local shard, cid, worker, token, amount, now = keys[1], args[1], args[2], args[3], tonumber(args[4]), store.now_ms(keys[1])
  local accounts = accounts_from(args, 6)
  begin_again(shard, cid, accounts[1], tonumber(token))
  enroll(shard, accounts)
  charge(shard, cid, accounts[1], tonumber(token), tonumber(args[5]))
  local woken = sweep(shard, now)
  local held = reserved_for(shard, cid, 'held')
  if held then
    local is_own = held.worker == '-' or held.token == tonumber(token)
    return reply(is_own and 'reserved' or 'fenced', '', woken)
  end
  local chain = chain_of(shard, accounts[1])
  local since = waits_since(shard, chain, cid)
  for _, account in ipairs(chain) do
    if not may_spend(shard, account, cid, amount, since, now) then
      stop_waiting(shard, chain, cid)
      stand(shard, account, cid, amount, since or fair_queue.place_at(budget(shard, account) .. ':waiting', now))
      return reply('exhausted', account, extend(woken, wake(shard, chain, now)))
    end
  end
  stop_waiting(shard, chain, cid)
  add(shard, chain, 'reserved', amount)
  redis.call('HSET', shard .. ':ledger:held', cid, table.concat({args[4], worker, token, accounts[1]}, ' '))
  return reply('reserved', '', extend(woken, wake(shard, chain, now)))
end

-- deck_budget_settle: charge what the log has come to, and end the reservation.
-- ARGV cid, token, outcome, sum of its log, account, parent …
--   outcome 'done', or 'lost': the call may be billed and brought no reply
-- returns {'settled', '', woken …}
local function settle(keys, args)
  local shard, cid, token, now = keys[1], args[1], tonumber(args[2]), store.now_ms(keys[1])
  local accounts = accounts_from(args, 5)
  enroll(shard, accounts)
  local chain = chain_of(shard, accounts[1])
  charge(shard, cid, accounts[1], token, tonumber(args[4]))
  local held = reserved_for(shard, cid, 'held')
  if held and (held.worker == '-' or held.token == token) then
    if args[3] == 'lost' then
      lose(shard, cid, held)
      redis.call('HDEL', shard .. ':ledger:lost', cid)
    else
      give_back(shard, cid, held)
    end
  end
  drop_deleted(shard, accounts[1])
  local woken = sweep(shard, now)
  return reply('settled', '', extend(woken, wake(shard, chain, now)))
end

-- deck_budget_withdraw: a conversation does no longer wait for its budget.  ARGV cid, account
-- returns {'withdrawn', '', woken …}
local function withdraw(keys, args)
  local chain = chain_of(keys[1], args[2])
  stop_waiting(keys[1], chain, args[1])
  return reply('withdrawn', '', wake(keys[1], chain, store.now_ms(keys[1])))
end

-- deck_budget_sweep: see after what dead workers had reserved, and move away what is of another type.
-- ARGV account …: whose keys are looked at besides.  returns {'swept', '', woken …}
local function sweep_now(keys, args)
  for name, kind in pairs({held = 'hash', lost = 'hash', crowded = 'set', swept = 'string'}) do
    store.is_there(keys[1], keys[1] .. ':ledger:' .. name, kind)
  end
  store.is_there(keys[1], keys[1] .. ':budgets', 'set')
  for _, account in ipairs(args) do
    for name, kind in pairs({[''] = 'hash', [':children'] = 'set', [':waiting'] = 'zset', [':wanted'] = 'hash'}) do
      store.is_there(keys[1], budget(keys[1], account) .. name, kind)
    end
  end
  return reply('swept', '', sweep(keys[1], store.now_ms(keys[1])))
end

-- deck_budget_limit: set a limit, or change it by an amount.
-- ARGV key of this very change, 'set', 'add' or 'from <limit>', amount or '' for no limit, account, parent …
--      'from <limit>': set it if it is this one; 'from ': if there is none
-- returns {'changed', limit or '', woken …} {'other', limit or ''}
local function change_limit(keys, args)
  local shard, accounts = keys[1], accounts_from(args, 4)
  enroll(shard, accounts)
  local key = budget(shard, accounts[1])
  local known = store.get(key, 'change') or ''
  if not string.find(' ' .. known .. ' ', ' ' .. args[1] .. ' ', 1, true) then
    local limit = store.get(key, 'limit') or ''
    if string.sub(args[2], 1, 5) == 'from ' and string.sub(args[2], 6) ~= limit then return reply('other', limit, {}) end
    redis.call('HSET', key, 'change', string.sub(args[1] .. ' ' .. known, 1, CHANGES_CHARS))
    if args[3] == '' then
      redis.call('HDEL', key, 'limit')
    elseif args[2] == 'add' then
      redis.call('HINCRBY', key, 'limit', args[3])
    else
      redis.call('HSET', key, 'limit', args[3])
    end
  end
  local limit, chain = store.get(key, 'limit') or '', chain_of(shard, accounts[1])
  local is_listed = limit ~= '' or not store.get(key, 'deleted')
  redis.call(is_listed and 'SADD' or 'SREM', shard .. ':budgets', accounts[1])
  if limit ~= '' then redis.call('PERSIST', key) end
  drop_deleted(shard, accounts[1])
  return reply('changed', limit, wake(shard, chain, store.now_ms(keys[1])))
end

-- deck_budget_forget: a conversation is deleted. What it has spent stays in the accounts above its own. An account with a
-- limit is kept as long as it has one, and one with delegates or a call under way until these have ended; a call in a
-- batch ends with the next sweep, because nobody is left to take the reply.  ARGV cid, account
-- returns {'forgotten'} {'kept'}
local function forget(keys, args)
  local shard, cid, account = keys[1], args[1], args[2]
  local key = budget(shard, account)
  local function is_kept()
    return store.get(key, 'limit') or store.get(shard .. ':ledger:held', cid) or redis.call('SCARD', key .. ':children') > 0
  end
  local kept = store.attempt(shard, key, account, is_kept)
  local parent = store.attempt(shard, key, account, store.get, key, 'parent')
  local children = parent and budget(shard, parent) .. ':children'
  -- A kept delegate keeps its parent too, or the accounts above could not be reached any more when its call ends.
  local is_listed = kept and (store.get(key, 'limit') or string.find(parent or '', '^conversation:'))
  if children and not is_listed then store.attempt(shard, children, account, redis.call, 'SREM', children, account) end
  if kept then
    redis.call('HSET', key, 'deleted', '1')
    return {'kept'}
  end
  if store.attempt(shard, key, account, store.get, key, 'deleted') then  -- the deletion is repeated
    store.attempt(shard, key, account, drop_deleted, shard, account)
    return {'forgotten'}
  end
  store.attempt(shard, shard .. ':ledger:lost', cid, redis.call, 'HDEL', shard .. ':ledger:lost', cid)
  redis.call('DEL', key, key .. ':children', key .. ':waiting', key .. ':wanted')
  if parent then store.attempt(shard, budget(shard, parent), parent, drop_deleted, shard, parent) end
  return {'forgotten'}
end

-- deck_budget_adopt: a conversation comes back, and the accounts above it know what it and its delegates have spent.
-- ARGV sum of its log, account, parent account, what its delegates have spent.  returns {'adopted'} {'known'}
local function adopt(keys, args)
  local shard, account, parent = keys[1], args[2], args[3]
  local key, children = budget(shard, account), budget(shard, parent) .. ':children'
  local own, deleted = unpack(redis.call('HMGET', key, 'own', 'deleted'))
  if own or deleted then
    if redis.call('HDEL', key, 'deleted') == 1 then redis.call('SADD', children, account) end
    redis.call('PERSIST', key)
    return {'known'}
  end
  -- An account that does not know the sum of the log was made for a limit that somebody has set meanwhile.
  redis.call('HSET', key, 'own', args[1])
  redis.call('HSETNX', key, 'parent', parent)
  add(shard, {account}, 'spent', tonumber(args[1]) + (tonumber(args[4]) or 0))
  redis.call('SADD', children, account)
  return {'adopted'}
end

redis.register_function('deck_budget_reserve', reserve)
redis.register_function('deck_budget_settle', settle)
redis.register_function('deck_budget_withdraw', withdraw)
redis.register_function('deck_budget_sweep', sweep_now)
redis.register_function('deck_budget_limit', change_limit)
redis.register_function('deck_budget_forget', forget)
redis.register_function('deck_budget_adopt', adopt)
