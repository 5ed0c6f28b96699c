package command

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"culvert.dev/dns"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

// Every key that a running gateway takes up makes a difference to what it is told.
func TestEverySettingReachesTheGateway(t *testing.T) {
	fresh := func() *file.Config {
		c, err := file.Parse("x.yaml", []byte(`
cluster: west
admin: 127.0.0.1:9090
servicePorts: {range: 20000-20999, state: /tmp/ports.json}
vips: {state: /tmp/vips.json}
dns: {listen: ["udp://:53"], upstreams: [192.0.2.53], recursionClients: [192.0.2.0/24]}
services: []
`))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	told := func(c *file.Config) string {
		var o gatewayOptions
		cfg, err := gatewayConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		memory, err := o.memoryLimit(c)
		if err != nil {
			t.Fatal(err)
		}
		level, asJSON, err := o.logSettings(c)
		if err != nil {
			t.Fatal(err)
		}
		d := cfg.DNS
		f := d.Server.Forward
		return fmt.Sprint(*cfg.ServicePorts, *cfg.VIPs, cfg.Limits, memory, level, asJSON, cfg.DrainDelay, cfg.DrainTimeout, cfg.Admin, cfg.AdminControl,
			d.Listeners, d.VIPs != nil && d.VIPs("changed"), d.DeferIdentity, d.Server.Zones, d.Server.TTL, d.Server.NegativeTTL, d.Server.RateLimit,
			d.Server.RateLimitExempt, d.Server.RecursionClients, f.Upstreams, f.Zones, f.PrivateZones, f.CacheBytes, f.MinTTL, f.MaxTTL, f.MaxStale)
	}
	before := told(fresh())
	n := 0
	var each func(path string, at func(*file.Config) reflect.Value)
	each = func(path string, at func(*file.Config) reflect.Value) {
		typ := at(fresh()).Type()
		switch path {
		case "ServicePorts.State", "VIPs.State": // they wait for a restart
			return
		case "DNS.Files", "DNS.Certificate": // of the listeners by TLS: another pair is shown, which tests of package gateway see
			return
		}
		if typ.Kind() == reflect.Struct && typ != reflect.TypeFor[registry.PortRange]() && typ != reflect.TypeFor[netip.Addr]() {
			for i := range typ.NumField() {
				each(path+"."+typ.Field(i).Name, func(c *file.Config) reflect.Value { return at(c).Field(i) })
			}
			return
		}
		c := fresh()
		v := at(c)
		switch value := v.Addr().Interface().(type) {
		case *int:
			*value += 7
		case *bool:
			*value = !*value
		case *time.Duration:
			*value += time.Hour
		case *file.Memory:
			*value = 64 << 20
		case *registry.PortRange:
			value.Last++
		case *netip.Addr:
			*value = netip.MustParseAddr("192.0.2.1")
		case *[]string:
			*value = append(*value, "changed")
		case *[]netip.Prefix:
			*value = append(*value, netip.MustParsePrefix("198.51.100.0/24"))
		case *[]file.DNSListener:
			*value = append(*value, file.DNSListener{DNSAddress: file.DNSAddress{Transport: string(dns.TCP), Address: ":53"}})
		case *[]file.DNSUpstream:
			*value = append(*value, file.DNSUpstream{Address: "192.0.2.54:53"})
		case *[]file.DNSForward:
			*value = append(*value, file.DNSForward{Zone: "changed", Upstreams: []file.DNSUpstream{{Address: "192.0.2.55:53"}}})
		case *string:
			*value = map[string]string{"Admin": "127.0.0.1:9091", "Log.Format": "json", "DNS.UnidentifiedCallers": "defer"}[path]
		default:
			if v.Kind() != reflect.Int { // the level of the log
				t.Fatalf("%s is a %s: have this test change it", path, typ)
			}
			v.SetInt(v.Int() + 4)
		}
		n++
		if told(c) == before {
			t.Errorf("%s has changed, and the gateway is not told", path)
		}
	}
	each("Admin", func(c *file.Config) reflect.Value { return reflect.ValueOf(&c.Admin).Elem() })
	each("Control", func(c *file.Config) reflect.Value { return reflect.ValueOf(&c.Control).Elem() })
	each("Limits", func(c *file.Config) reflect.Value { return reflect.ValueOf(&c.Limits).Elem() })
	each("Drain", func(c *file.Config) reflect.Value { return reflect.ValueOf(&c.Drain).Elem() })
	each("Log", func(c *file.Config) reflect.Value { return reflect.ValueOf(&c.Log).Elem() })
	each("ServicePorts", func(c *file.Config) reflect.Value { return reflect.ValueOf(c.ServicePorts).Elem() })
	each("VIPs", func(c *file.Config) reflect.Value { return reflect.ValueOf(c.VIPs).Elem() })
	each("DNS", func(c *file.Config) reflect.Value { return reflect.ValueOf(c.DNS).Elem() })
	if n < 34 {
		t.Errorf("%d keys were changed, want at least 34", n)
	}
}
