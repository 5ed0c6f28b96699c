package file

import (
	"log/slog"
	"net/netip"
	"net/url"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A format reads s into to, a pointer to a value of the format's type. Its complaint calls
// the value what.
type format func(what, s string, to any) *complaint

// formats are what the tag "as" may say.
var formats = map[string]format{
	"actor":            formatOf(parseActor),
	"adminAddress":     formatOf(parseAdminAddress),
	"alpn":             formatOf(parseALPN),
	"cacheSize":        formatOf(parseCacheSize),
	"cgroup":           formatOf(parseCgroup),
	"checkHost":        formatOf(parseCheckHost),
	"cidr":             formatOf(parseCIDR),
	"cipherSuite":      formatOf(parseCipherSuite),
	"clientAddress":    formatOf(parseClientAddress),
	"cluster":          formatOf(parseCluster),
	"controllerName":   formatOf(parseControllerName),
	"destination":      formatOf(parseDestination),
	"dnsAddress":       formatOf(parseDNSAddress),
	"dnsZone":          formatOf(parseDNSZone),
	"endpoint":         formatOf(parseServiceEndpoint),
	"gateway":          formatOf(parseGatewayAddress),
	"fieldName":        formatOf(parseFieldName),
	"host":             formatOf(parseHost),
	"hostPort":         formatOf(hopAddress(checkHostPort)),
	"inboundListener":  formatOf(parseInboundListener),
	"issuer":           formatOf(parseIssuer),
	"keyPattern":       formatOf(patternOf(1, `write "example.com/*" or "example.com/team"`, "DOMAIN/NAME")),
	"label":            formatOf(parseLabel),
	"gatewayName":      formatOf(parseGatewayName),
	"listenerAddress":  formatOf(parseListenerAddress),
	"localDNS":         formatOf(parseLocalDNS),
	"localListener":    formatOf(parseLocalListener),
	"localUser":        formatOf(parseLocalUser),
	"logLevel":         formatOf(parseLogLevel),
	"memory":           formatOf(parseMemory),
	"namespacePattern": formatOf(patternOf(0, `write "shop" or "team-*"`, "a namespace")),
	"object":           formatOf(parseObject),
	"objectPattern":    formatOf(patternOf(1, `write "shop/*", "*/web" or "shop/web"`, "NAMESPACE/NAME")),
	"origin":           formatOf(parseOrigin),
	"ownAddress":       formatOf(parseOwnAddress),
	"ownProgram":       formatOf(parseOwnProgram),
	"pattern":          formatOf(parseNamePattern),
	"policyName":       formatOf(parsePolicyName),
	"policyPorts":      formatOf(parsePolicyPorts),
	"portName":         formatOf(parsePortName),
	"portRange":        formatOf(parsePortRange),
	"proxy":            formatOf(hopAddress(checkProxy)),
	"proxyURL":         formatOf(parseProxyURL),
	"publicAddress":    formatOf(parsePublicAddress),
	"requestField":     formatOf(parseRequestField),
	"routerAddress":    formatOf(parseRouterAddress),
	"san":              formatOf(parseSAN),
	"serverName":       formatOf(parseServerName),
	"servicePattern":   formatOf(parseServicePattern),
	"socketMode":       formatOf(parseSocketMode),
	"spiffePattern":    formatOf(parseSPIFFEPattern),
	"spiffe":           formatOf(parseSPIFFE),
	"statuses":         formatOf(parseStatuses),
	"stunServer":       formatOf(parseSTUNServer),
	"suffix":           formatOf(parseSuffix),
	"target":           formatOf(parseTarget),
	"trustDomain":      formatOf(parseTrustDomain),
	"tunnelPath":       formatOf(parseTunnelPath),
	"upstream":         formatOf(parseDNSUpstream),
	"user":             formatOf(parseUser),
	"urlPath":          formatOf(parseURLPath),
	"bundleURL":        formatOf(parseBundleURL),
	"ownListener":      formatOf(parseOwnListener),
	"workload":         formatOf(parseWorkload),
	"workloadAPI":      formatOf(parseWorkloadAPI),
	"webSocketURL":     formatOf(hopAddress(checkWebSocketURL)),
	"zone":             formatOf(parseZone),
}

// formatOf makes a format of a function that parses a T.
func formatOf[T any](parse func(what, s string) (T, *complaint)) format {
	return func(what, s string, to any) (c *complaint) {
		*to.(*T), c = parse(what, s)
		return c
	}
}

// parseALPN parses the name of a protocol that TLS may have inside, RFC 7301.
func parseALPN(_, s string) (string, *complaint) {
	if len(s) > 255 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == ',' || r == '\\' }) {
		return "", complain("write it as h2 or http/1.1", "%q is not the name of a protocol", clip(s))
	}
	return s, nil
}

func parseNamePattern(_, s string) (tunnel.Pattern, *complaint) {
	p, c := parsePattern(s)
	if c != nil {
		return tunnel.Pattern{}, complain(c.hint, "name %q: %s", clip(s), c.msg)
	}
	return p, nil
}

// parseServicePattern parses a name of a service, which may be the catch-all.
func parseServicePattern(what, s string) (tunnel.Pattern, *complaint) {
	if s == tunnel.AnyName.String() {
		return tunnel.AnyName, nil
	}
	p, c := parseNamePattern(what, s)
	if c == nil && p.Suffix.IsReserved() {
		return tunnel.Pattern{}, complain("give the service another name", "name %q: %s", clip(s), registry.ReservedName)
	}
	return p, c
}

func parseServiceEndpoint(_, s string) (registry.Endpoint, *complaint) {
	ep, c := parseEndpoint(s)
	if c != nil {
		return registry.Endpoint{}, complain(c.hint, "endpoint %q: %s", clip(s), c.msg)
	}
	return ep, nil
}

func parseGatewayAddress(what, s string) (registry.Endpoint, *complaint) {
	ep, c := parseEndpoint(s)
	if c == nil && ep.Port == 0 {
		c = complain("write HOST:PORT", "it has no port")
	}
	if c != nil {
		return registry.Endpoint{}, complain(c.hint, "%s %q: %s", what, clip(s), c.msg)
	}
	return ep, nil
}

// parseLabel parses one label of a name, and returns it in lower case.
func parseLabel(what, s string) (string, *complaint) {
	name, err := tunnel.ParseName(s + ".x") // digits alone would be an address
	if err != nil || strings.ContainsAny(s, "._") || strings.HasPrefix(s, "-") || strings.HasSuffix(s, "-") {
		return "", complain("use letters, digits and hyphens", "%s %q is not one label of a DNS name", what, clip(s))
	}
	return strings.TrimSuffix(name.String(), ".x"), nil
}

func parsePortName(what, s string) (string, *complaint) {
	name, c := parseLabel(what, s)
	if c == nil && len(name) > 15 { // RFC 6335 section 5.1
		return "", complain("", "the name of a port has %d characters, limit 15", len(name))
	}
	return name, c
}

func parseCIDR(_, s string) (netip.Prefix, *complaint) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		hint := "write it as 192.0.2.0/24 or 2001:db8::/32"
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			hint = "did you mean " + netip.PrefixFrom(a, a.BitLen()).String() + "?"
		}
		return netip.Prefix{}, complain(hint, "%q is not an address range", clip(s))
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, complain("write it as an IPv4 range", "%q is an IPv4 range in IPv6 form", clip(s))
	}
	if p != p.Masked() {
		return netip.Prefix{}, complain("did you mean "+p.Masked().String()+"?", "range %q has bits set after the first %d", clip(s), p.Bits())
	}
	return p, nil
}

func parseDestination(_, s string) (netip.Addr, *complaint) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		hint := "write an IP address, without a port"
		if _, err := netip.ParseAddrPort(s); err == nil {
			hint = "leave the port out: it goes to ports"
		}
		return netip.Addr{}, complain(hint, "%q is not an address", clip(s))
	}
	if c := destination(a); c != nil {
		return netip.Addr{}, complain(c.hint, "address %q: %s", clip(s), c.msg)
	}
	return a.Unmap(), nil
}

// parseCheckHost parses the name that a health check asks for.
func parseCheckHost(_, s string) (string, *complaint) {
	name, port, c := cutPort(s)
	if c == nil && port != 0 {
		c = complain("leave the port out", "it has a port")
	}
	if _, err := netip.ParseAddr(name); c == nil && err == nil {
		c = complain("write the name that clients ask for", "it is an address")
	}
	if c == nil {
		var host tunnel.Name
		if host, c = parseName(name); c == nil {
			return host.String(), nil
		}
	}
	return "", complain(c.hint, "host %q: %s", clip(s), c.msg)
}

func parseURLPath(_, s string) (string, *complaint) {
	if s[0] != '/' || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }) {
		return "", complain("write it as /healthz, with %20 and the like for what is not ASCII", "path %q is not that of a URL", clip(s))
	}
	return s, nil
}

// parseStatuses parses an HTTP status code, or a range of them.
func parseStatuses(_, s string) (string, *complaint) {
	if _, err := registry.ParseStatuses(s); err != nil {
		return "", complain("write it as 200 or 200-299", "%q is not a status code from 200 to 599, or a range of them", clip(s))
	}
	return s, nil
}

// hopAddress parses where a hop is. It does not quote what may have a password in it.
func hopAddress(check func(string) *complaint) func(what, s string) (string, *complaint) {
	return func(_, s string) (string, *complaint) {
		switch c := check(s); {
		case c == nil:
			return s, nil
		case strings.Contains(s, "@"):
			return "", complain(c.hint, "a gateway: %s", c.msg)
		default:
			return "", complain(c.hint, "gateway %q: %s", clip(s), c.msg)
		}
	}
}

func checkHostPort(s string) *complaint {
	ep, c := parseEndpoint(s)
	if c == nil && ep.Port == 0 {
		c = complain("write host:port", "it has no port")
	}
	return c
}

// checkProxy checks a host and a port, with https:// before them for TLS.
func checkProxy(s string) *complaint {
	ep, c := parseEndpoint(strings.TrimPrefix(s, "https://"))
	if c == nil && ep.Port == 0 {
		c = complain("write host:port, or https://host:port for TLS", "it has no port")
	}
	return c
}

func checkWebSocketURL(s string) *complaint {
	const hint = "write ws://host:port/ or wss://host/, with a path that ends with a slash if there is one"
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return complain(hint, "it is not a URL")
	case u.Scheme != "ws" && u.Scheme != "wss", u.Hostname() == "":
		return complain(hint, "it does not begin with ws:// or wss:// and a host")
	case u.User != nil:
		return complain("use userFile", "it has credentials in it")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return complain(hint, "it has a query")
	case u.Path != "" && !strings.HasSuffix(u.Path, "/"):
		return complain(hint, "its path does not end with a slash")
	}
	_, c := parseEndpoint(u.Host)
	return c
}

// parseSPIFFE parses a SPIFFE id, or a trust domain with the scheme.
func parseSPIFFE(_, s string) (string, *complaint) {
	if !strings.HasPrefix(s, "spiffe://") || strings.HasSuffix(s, "/") {
		return "", complain("write spiffe://domain/path, or spiffe://domain for any of it", "%q is not a SPIFFE id", clip(s))
	}
	return s, nil
}

func parseTrustDomain(_, s string) (string, *complaint) {
	if len(s) > 255 || strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
	}) {
		return "", complain("write cluster.local, without spiffe:// and in lower case", "%q is not a trust domain", clip(s))
	}
	return s, nil
}

// parseTunnelPath parses the path in front of a destination.
func parseTunnelPath(_, s string) (string, *complaint) {
	if !strings.HasPrefix(s, "/") || !strings.HasSuffix(s, "/") || strings.ContainsAny(s, "?#% ") {
		return "", complain("write /some/path/", "path %q does not begin and end with a slash, or has a query, an escape or a space", clip(s))
	}
	return s, nil
}

func parseHost(_, s string) (string, *complaint) {
	if _, c := parseEndpoint(s); c != nil || strings.Contains(s, ":") {
		return "", complain("write a name, without a port", "%q is not a host", clip(s))
	}
	return strings.ToLower(s), nil
}

func parseOrigin(_, s string) (string, *complaint) {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme+"://"+u.Host != s {
		return "", complain("write https://app.example.com", "%q is not an origin", clip(s))
	}
	return strings.ToLower(s), nil
}

// parseCluster returns a name that is wrong, too, so that it does not count as missing.
func parseCluster(_, s string) (string, *complaint) {
	if _, err := tunnel.ParseName(s); err != nil {
		return s, complain("use letters, digits and hyphens", "cluster %q: %v", clip(s), err)
	}
	return s, nil
}

func parseZone(_, s string) (string, *complaint) {
	name, c := parseName(s)
	if c != nil {
		return "", complain(c.hint, "zone %q: %s", clip(s), c.msg)
	}
	return name.String(), nil
}

func parsePortRange(_, s string) (registry.PortRange, *complaint) {
	r, err := registry.ParsePortRange(s)
	if err != nil {
		return r, complain("write it as 20000-20999", "range %q: %v", clip(s), err)
	}
	return r, nil
}

// parseOwnAddress parses an address of this machine.
func parseOwnAddress(_, s string) (netip.Addr, *complaint) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		hint := "write an address of this machine, or leave the key out for all of them"
		if _, err := netip.ParseAddrPort(s); err == nil {
			hint = "leave the port out: the range says which"
		}
		return a, complain(hint, "%q is not an IP address", clip(s))
	}
	return a.Unmap(), nil
}

func parseMemory(what, s string) (Memory, *complaint) {
	m, err := ParseMemory(s)
	if err != nil {
		return 0, complain("write it as 512MiB or 2GiB; auto takes nine tenths of the cgroup's", "%s: %v", what, err)
	}
	return m, nil
}

func parseCacheSize(_, s string) (Memory, *complaint) {
	m, err := parseSize(s, leastCache)
	if err != nil {
		return 0, complain("write it as 32MiB", "size: %v", err)
	}
	return m, nil
}

func parseLogLevel(what, s string) (level slog.Level, c *complaint) {
	if c := oneOf(what, s, []string{"debug", "info", "warn", "error"}); c != nil {
		return level, c
	}
	_ = level.UnmarshalText([]byte(s)) // knows these words
	return level, nil
}
