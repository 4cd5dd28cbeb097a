{{- define "sglang-batch.labels" -}}
app.kubernetes.io/name: sglang-batch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sglang-batch.secret" -}}
{{ .Values.secret.name | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{- /* The URLs of all workers, of those that may come, too. For a job, of those that do. */ -}}
{{- define "sglang-batch.workers" -}}
{{- $name := printf "%s-worker" .Release.Name -}}
{{- $number := .Values.workers.replicas -}}
{{- if and .job .Values.autoscaling.enabled -}}
{{- $number = .Values.autoscaling.minReplicas -}}
{{- end -}}
{{- $urls := list -}}
{{- range $i := until (int $number) -}}
{{- $urls = append $urls (printf "http://%s-%d.%s:30000" $name $i $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{- define "sglang-batch.env" -}}
- name: WORKERS_KEY
  valueFrom:
    secretKeyRef: {name: {{ include "sglang-batch.secret" . }}, key: workers-key}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "sglang-batch.secret" . }}, key: hf-token, optional: true}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Of a server: it lives, and it takes calls. */ -}}
{{- define "sglang-batch.probes" -}}
livenessProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
