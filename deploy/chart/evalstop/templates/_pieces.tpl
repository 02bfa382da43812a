{{- define "evalstop.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "evalstop.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "evalstop.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What every process of the service has: settings, the Secret's after them. */ -}}
{{- define "evalstop.serviceEnvironment" -}}
{{- with .Values.service.settings }}
env:
  {{- range $name, $value := . }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
{{- end }}
envFrom:
  - secretRef: {name: {{ .Values.service.secret }}}
{{- end }}

{{- define "evalstop.placement" -}}
{{- range $name := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
