{{/* Of (list to from): puts what from has into to, maps into maps. Says nothing. */}}
{{- define "culvert.merge" -}}
{{- $to := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (index $to $key)) -}}
{{- include "culvert.merge" (list (index $to $key) $value) -}}
{{- else -}}
{{- $_ := set $to $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What gateways and DNS servers are told alike. Of (list $ config): adds to config. */}}
{{- define "culvert.commonConfig" -}}
{{- $root := index . 0 -}}
{{- $c := index . 1 -}}
{{- $v := $root.Values -}}
{{- $_ := set $c "admin" "unix:/run/culvert/admin.sock" -}}
{{- $_ := set $c "cluster" $v.cluster -}}
{{- $_ := set $c "log" (dict "format" $v.log.format "level" $v.log.level) -}}
{{- $_ := set $c "drain" (dict "delay" (printf "%vs" $v.drain.delay) "timeout" (printf "%vs" $v.drain.timeout)) -}}
{{- if include "culvert.kubernetes" $root -}}
{{- $k := dict "leader" (printf "%s/%s" $root.Release.Namespace (include "culvert.fullname" $root)) -}}
{{- $_ := set $k "state" "/var/lib/culvert/kubernetes" -}}
{{- with $v.namespaces -}}
{{- $_ := set $k "namespaces" . -}}
{{- end -}}
{{- if $v.discovery.enabled -}}
{{- $d := dict "gatewayNamespaces" ($v.discovery.gatewayNamespaces | default (list $root.Release.Namespace)) -}}
{{- with $v.network -}}
{{- $_ := set $d "network" . -}}
{{- end -}}
{{- range $key := list "zone" "allow" "deny" "suffixes" "prefer" "podCIDRs" "clusters" "externalNames" "exportedTo" -}}
{{- with index $v.discovery $key -}}
{{- $_ := set $d $key . -}}
{{- end -}}
{{- end -}}
{{- $_ := set $k "discovery" $d -}}
{{- end -}}
{{- if $v.multiCluster.enabled -}}
{{- $_ := set $k "multiCluster" true -}}
{{- end -}}
{{- $_ := set $c "kubernetes" $k -}}
{{- else -}}
{{- $_ := set $c "services" list -}}
{{- end -}}
{{- end -}}

{{- define "culvert.gatewayConfig" -}}
{{- $c := dict -}}
{{- include "culvert.commonConfig" (list . $c) -}}
{{- $v := .Values -}}
{{- with $v.topologyZone -}}
{{- $_ := set $c "topologyZone" . -}}
{{- end -}}
{{- if $v.gateway.listeners -}}
{{- $_ := set $c "listeners" $v.gateway.listeners -}}
{{- else if not $v.gatewayAPI.enabled -}}
{{- $_ := set $c "listeners" (list (dict "address" ":443")) -}}
{{- end -}}
{{- if $v.gatewayAPI.enabled -}}
{{- $g := dict "controllerName" $v.gatewayAPI.controllerName -}}
{{- with $v.gatewayAPI.addresses -}}
{{- $_ := set $g "addresses" . -}}
{{- end -}}
{{- with $v.gatewayAPI.infrastructureKeys -}}
{{- $_ := set $g "infrastructureKeys" . -}}
{{- end -}}
{{- /* A Service that is not looked at has no addresses to tell. */ -}}
{{- if and $v.gateway.enabled $v.gateway.service.enabled (or (not $v.namespaces) (has .Release.Namespace $v.namespaces)) -}}
{{- $_ := set $g "service" (printf "%s/%s" .Release.Namespace (include "culvert.fullname" .)) -}}
{{- end -}}
{{- $_ := set (index $c "kubernetes") "gatewayAPI" $g -}}
{{- end -}}
{{- if include "culvert.importedServices" . -}}
{{- $i := dict "ports" $v.multiCluster.importedServices.ports "selector" (fromYaml (include "culvert.selector" (list . "gateway"))) -}}
{{- $_ := set (index $c "kubernetes") "importedServices" $i -}}
{{- end -}}
{{- if $v.authorizationPolicies.enabled -}}
{{- $p := dict -}}
{{- with $v.authorizationPolicies.trustDomains -}}
{{- $_ := set $p "trustDomains" . -}}
{{- end -}}
{{- $_ := set (index $c "kubernetes") "authorizationPolicies" $p -}}
{{- end -}}
{{- with $v.gateway.sharedSessions -}}
{{- if .enabled -}}
{{- if not (and .key .trust .ids) -}}
{{- fail "gateway.sharedSessions needs key, trust and ids: replicas ask each other by mutual TLS" -}}
{{- end -}}
{{- $r := dict "to" (list (printf "%s-replicas.%s.svc:%d" (include "culvert.fullname" $) $.Release.Namespace (int .port))) "key" .key "trust" .trust "ids" .ids -}}
{{- with .serverName -}}
{{- $_ := set $r "serverName" . -}}
{{- end -}}
{{- $_ := set $c "replicas" $r -}}
{{- end -}}
{{- end -}}
{{- include "culvert.merge" (list $c (deepCopy $v.config)) -}}
{{- include "culvert.merge" (list $c (deepCopy $v.gateway.config)) -}}
{{- toYaml $c -}}
{{- end -}}

{{- define "culvert.dnsConfig" -}}
{{- $c := dict -}}
{{- include "culvert.commonConfig" (list . $c) -}}
{{- $v := .Values -}}
{{- if not $v.discovery.enabled -}}
{{- $_ := unset $c "kubernetes" -}}
{{- $_ := set $c "services" list -}}
{{- end -}}
{{- $d := dict "listen" (list "udp://:53" "tcp://:53") -}}
{{- with $v.dns.zones -}}
{{- $_ := set $d "zones" . -}}
{{- end -}}
{{- with $v.dns.recursionClients -}}
{{- $_ := set $d "recursionClients" . -}}
{{- end -}}
{{- $_ := set $c "dns" $d -}}
{{- include "culvert.merge" (list $c (deepCopy $v.config)) -}}
{{- include "culvert.merge" (list $c (deepCopy $v.dns.config)) -}}
{{- toYaml $c -}}
{{- end -}}

{{/* A sum of what of a configuration is taken up by a restart only: the rest is when the file changes. */}}
{{- define "culvert.restartSum" -}}
{{- $c := fromYaml . -}}
{{- list (get ($c.servicePorts | default dict) "state") (get ($c.vips | default dict) "state") | toJson | sha256sum -}}
{{- end -}}
