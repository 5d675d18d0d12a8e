{{- define "deckhands.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "deckhands.labels" -}}
app.kubernetes.io/name: deckhands
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels by which the pods of a component are selected: (dict "root" $ "component" "store") */}}
{{- define "deckhands.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "deckhands.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "deckhands.secret" -}}
{{ .Values.secrets.existing | default (printf "%s-secrets" (include "deckhands.name" .)) }}
{{- end }}

{{/* A variable from the secret: (list $ "NAME") */}}
{{- define "deckhands.secretEnv" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ include "deckhands.secret" $root }}, key: {{ $name }}}}
{{- end }}

{{/* The hosts of the Sentinels of `store` or `queue`: (list $ "store") */}}
{{- define "deckhands.sentinels" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $name := include "deckhands.name" $root -}}
{{- range $number := until 3 -}}
{{- if $number }},{{ end }}{{ $name }}-{{ $part }}-{{ $number }}.{{ $name }}-{{ $part }}:26379
{{- end -}}
{{- end }}

{{/* The URL of the store for a login such as `tool:$(TOOL_PASSWORD)`: (list $ "store" LOGIN) */}}
{{- define "deckhands.url" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $login := index . 2 -}}
{{- $of := index $root.Values $part -}}
{{- if eq $of.kind "external" -}}
{{ $of.external.scheme }}://{{ $login }}@{{ $of.external.hosts }}{{ $of.external.path }}
{{- else if eq $of.kind "sentinel" -}}
redis+sentinel://{{ $login }}@{{ include "deckhands.sentinels" (list $root $part) }}/{{ $part }}/0?sentinel_username=client&sentinel_password=$(SENTINEL_PASSWORD)
{{- else -}}
redis://{{ $login }}@{{ include "deckhands.name" $root }}-{{ $part }}:6379/0
{{- end -}}
{{- end }}

{{/* The variables of a role that reaches the store as its own user: (list $ "tool") */}}
{{- define "deckhands.storeEnv" -}}
{{- $root := index . 0 -}}
{{- $user := index . 1 -}}
{{- $password := printf "%s_PASSWORD" (upper $user) -}}
{{ include "deckhands.secretEnv" (list $root $password) }}
{{- if or (eq $root.Values.store.kind "sentinel") (eq $root.Values.queue.kind "sentinel") }}
{{ include "deckhands.secretEnv" (list $root "SENTINEL_PASSWORD") }}
{{- end }}
- name: DECKHANDS_URL
  value: {{ include "deckhands.url" (list $root "store" (printf "%s:$(%s)" $user $password)) | quote }}
- name: DECKHANDS_ACKS
  value: {{ $root.Values.store.acks }}
{{- end }}

{{/* The address of Celery's broker for a role, as its own user, whose password stands above: (list $ "tool") */}}
{{- define "deckhands.queueEnv" -}}
{{- $root := index . 0 -}}
{{- $user := index . 1 -}}
- name: DECKHANDS_CELERY_URL
  value: {{ include "deckhands.url" (list $root "queue" (printf "%s:$(%s_PASSWORD)" $user (upper $user))) | quote }}
{{- end }}

{{/* Keys of roles that read or write what is encrypted. */}}
{{- define "deckhands.keyEnv" -}}
{{ include "deckhands.secretEnv" (list . "SECRET_KEY") | replace "- name: SECRET_KEY" "- name: DECKHANDS_SECRET_KEY" }}
- name: DECKHANDS_MASTER_KEYS
  valueFrom: {secretKeyRef: {name: {{ include "deckhands.secret" . }}, key: MASTER_KEYS, optional: true}}
{{- end }}

{{/* What every process has. */}}
{{- define "deckhands.commonEnv" -}}
- name: DECKHANDS_HOME
  value: /tmp/deckhands
- name: DECKHANDS_LOG_FORMAT
  value: {{ .Values.logFormat }}
{{- with .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A container may do nothing that it does not need; this meets the Pod Security Standard `restricted`. */}}
{{- define "deckhands.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "deckhands.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Checks of a worker's heartbeat: (list ROLE). A store that does not answer is no reason to restart a worker. */}}
{{- define "deckhands.workerProbes" -}}
{{- $role := . -}}
startupProbe:
  exec: {command: [sh, -c, "python -P -m broker.health {{ $role }}; [ $? -ne 1 ]"]}
  periodSeconds: 5
  timeoutSeconds: 20
  failureThreshold: 60
livenessProbe:
  exec: {command: [sh, -c, "python -P -m broker.health {{ $role }}; [ $? -ne 1 ]"]}
  periodSeconds: 20
  timeoutSeconds: 20
  failureThreshold: 3
readinessProbe:
  exec: {command: [python, -P, -m, broker.health, {{ $role }}]}
  periodSeconds: 30
  timeoutSeconds: 20
{{- end }}

{{/* Spreads the pods of a component over nodes: (dict "root" $ "component" …) */}}
{{- define "deckhands.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "deckhands.selector" . | nindent 8 }}
{{- end }}

{{/* What a server of several and its Sentinel know of themselves: (list $ "store") */}}
{{- define "deckhands.memberEnv" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: ANNOUNCE
  value: $(POD_NAME).{{ include "deckhands.name" $root }}-{{ $part }}
- name: SENTINELS
  value: {{ include "deckhands.sentinels" (list $root $part) }}
- name: SERVICE
  value: {{ $part }}
- name: DOWN_AFTER_MS
  value: {{ $root.Values.store.downAfterMilliseconds | quote }}
{{- end }}
