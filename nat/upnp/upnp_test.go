package upnp

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/nat"
)

var (
	loopback = netip.MustParseAddr("127.0.0.1")
	route    = nat.Route{Router: loopback, Local: loopback}
)

// An igd is a router that speaks UPnP.
type igd struct {
	*httptest.Server
	conn net.PacketConn

	mu        sync.Mutex // guards what follows
	location  string     // that it announces; "" for the right one
	control   string     // control URL; "" for the right one
	base      string     // URLBase
	redirects string
	padding   int // bytes in the description
	outside   string
	permanent bool
	refuses   int
	mappings  map[string]entry // by protocol and outside port
	actions   []string
}

type entry struct{ client, port, lease string }

func newIGD(t *testing.T) *igd {
	t.Helper()
	g := &igd{outside: "203.0.113.7", mappings: map[string]entry{}}
	g.Server = httptest.NewServer(g)
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.conn = conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2048)
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			if !bytes.HasPrefix(b[:n], []byte("M-SEARCH * HTTP/1.1\r\n")) {
				continue
			}
			g.mu.Lock()
			location := g.location
			g.mu.Unlock()
			if location == "" {
				location = g.URL + "/rootDesc.xml"
			}
			_, _ = conn.WriteTo([]byte("nonsense"), from)
			_, _ = conn.WriteTo(fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nST: %s\r\nLOCATION: %s\r\n\r\n", targets[1], location), from)
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
		g.Server.Close()
	})
	return g
}

func (g *igd) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.redirects != "":
		http.Redirect(w, req, g.redirects, http.StatusFound)
	case req.Method == http.MethodGet:
		control := g.control
		if control == "" {
			control = "/ctl/IPConn"
		}
		fmt.Fprintf(w, `<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><!--%s-->`, strings.Repeat("x", g.padding))
		if g.base != "" {
			fmt.Fprintf(w, `<URLBase>%s</URLBase>`, g.base)
		}
		fmt.Fprintf(w, `<device><deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device><serviceList><service>
<serviceType>%s</serviceType><serviceId>x</serviceId><SCPDURL>/x</SCPDURL><controlURL>%s</controlURL><eventSubURL>/x</eventSubURL>
</service></serviceList></device></deviceList></device></root>`, targets[1], control)
	default:
		g.act(w, req)
	}
}

// act performs an action of SOAP.
func (g *igd) act(w http.ResponseWriter, req *http.Request) {
	_, action, _ := strings.Cut(strings.Trim(req.Header.Get("SOAPACTION"), `"`), "#")
	g.actions = append(g.actions, action)
	body, _ := io.ReadAll(req.Body)
	in := map[string]string{}
	d := xml.NewDecoder(bytes.NewReader(body))
	for name := ""; ; {
		tok, err := d.Token()
		if err != nil {
			break
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			name = tok.Name.Local
		case xml.CharData:
			in[name] = string(tok)
		case xml.EndElement:
			name = ""
		}
	}
	fail := func(code int) {
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprintf(w, `<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail><UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>%d</errorCode><errorDescription>x</errorDescription></UPnPError></detail></s:Fault></s:Body></s:Envelope>`, code)
	}
	answer := func(out string) {
		fmt.Fprintf(w, `<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><u:%sResponse xmlns:u="%s">%s</u:%[1]sResponse></s:Body></s:Envelope>`, action, targets[1], out)
	}
	key := in["NewProtocol"] + in["NewExternalPort"]
	e, found := g.mappings[key]
	switch {
	case action == "GetExternalIPAddress":
		answer("<NewExternalIPAddress>" + g.outside + "</NewExternalIPAddress>")
	case action == "GetSpecificPortMappingEntry" && !found:
		fail(errNoSuchEntry)
	case action == "GetSpecificPortMappingEntry":
		answer("<NewInternalPort>" + e.port + "</NewInternalPort><NewInternalClient>" + e.client + "</NewInternalClient><NewEnabled>1</NewEnabled><NewPortMappingDescription>x</NewPortMappingDescription><NewLeaseDuration>" + e.lease + "</NewLeaseDuration>")
	case action == "DeletePortMapping":
		delete(g.mappings, key)
		answer("")
	case g.refuses != 0:
		fail(g.refuses)
	case g.permanent && in["NewLeaseDuration"] != "0":
		fail(errPermanentOnly)
	default:
		g.mappings[key] = entry{in["NewInternalClient"], in["NewInternalPort"], in["NewLeaseDuration"]}
		answer("")
	}
}

func (g *igd) find(t *testing.T, wait time.Duration) (*Client, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	c, err := new(Finder).find(ctx, route, g.conn.LocalAddr().String())
	if err != nil {
		return nil, err
	}
	return c.(*Client), nil
}

const patience = 30 * time.Second

var request = nat.Request{Network: "tcp", Internal: 443, External: netip.AddrPortFrom(netip.Addr{}, 8443), Lifetime: time.Hour}

func TestMap(t *testing.T) {
	g := newIGD(t)
	c, err := g.find(t, patience)
	if err != nil {
		t.Fatal(err)
	}
	if at, lost, err := c.Poll(t.Context()); at.String() != "203.0.113.7" || lost || err != nil {
		t.Errorf("Poll returned %s, %v, %v", at, lost, err)
	}
	grant, err := c.Map(t.Context(), request)
	if err != nil || grant.External.Port() != 8443 || grant.Lifetime != time.Hour || grant.Check == 0 {
		t.Errorf("Map returned %+v, %v", grant, err)
	}
	want := entry{"127.0.0.1", "443", "3600"}
	if got := g.mappings["TCP8443"]; got != want {
		t.Errorf("the router has %+v, want %+v", got, want)
	}
	n := len(g.actions)
	if _, err := c.Map(t.Context(), request); err != nil || len(g.actions) != n+1 {
		t.Errorf("a mapping that is there was asked for by %d actions, %v; want one question alone", len(g.actions)-n, err)
	}
	remove := request
	remove.Lifetime = 0
	if _, err := c.Map(t.Context(), remove); err != nil || len(g.mappings) != 0 {
		t.Errorf("%d mappings left, %v", len(g.mappings), err)
	}
}

func TestMapRefusals(t *testing.T) {
	others := entry{"192.168.1.66", "443", "0"}
	for _, tt := range []struct {
		name   string
		router func(*igd)
		text   string // of the error; "" for none
		taken  bool
		left   entry // at the router
	}{
		{"another host has the port", func(g *igd) { g.mappings["TCP8443"] = others }, "taken by another host", true, others},
		{"the router says so", func(g *igd) { g.refuses = errConflict }, "taken by another host", true, entry{}},
		{"switched off", func(g *igd) { g.refuses = errNotAuthorized }, "switched off", false, entry{}},
		{"unknown code", func(g *igd) { g.refuses = 899 }, "does not say why (code 899)", false, entry{}},
		{"permanent mappings only", func(g *igd) { g.permanent = true }, "", false, entry{"127.0.0.1", "443", "0"}},
		{"a lease that ends soon", func(g *igd) { g.mappings["TCP8443"] = entry{"127.0.0.1", "443", "9"} }, "", false, entry{"127.0.0.1", "443", "3600"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newIGD(t)
			tt.router(g)
			c, err := g.find(t, patience)
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Map(t.Context(), request)
			refusal, _ := errors.AsType[*nat.Refusal](err)
			if (err != nil) != (tt.text != "") || err != nil && (!strings.Contains(err.Error(), tt.text) || refusal == nil || refusal.Taken != tt.taken) {
				t.Errorf("Map returned %v (%+v), want %q, taken %v", err, refusal, tt.text, tt.taken)
			}
			if got := g.mappings["TCP8443"]; got != tt.left {
				t.Errorf("the router has %+v, want %+v", got, tt.left)
			}
			remove := request
			remove.Lifetime = 0
			_, _ = c.Map(t.Context(), remove)
			if got := g.mappings["TCP8443"]; tt.left == others && got != others {
				t.Errorf("a mapping of another host was deleted")
			}
		})
	}
}

// Nobody but the router is connected to, whatever the answers say.
func TestFindConnectsToTheRouterAlone(t *testing.T) {
	victim := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("another host was connected to") }))
	t.Cleanup(victim.Close)
	// The same socket by another address: what is not the router's must not be connected to.
	elsewhere := strings.Replace(victim.URL, "127.0.0.1", "127.0.0.2", 1)
	var finding sync.WaitGroup
	for _, tt := range []struct {
		name   string
		router func(*igd)
		says   string
	}{
		{"LOCATION", func(g *igd) { g.location = elsewhere + "/x" }, "not a URL of the router"},
		{"LOCATION by name", func(g *igd) { g.location = strings.Replace(elsewhere, "127.0.0.2", "localhost", 1) }, "not a URL of the router"},
		{"LOCATION with another scheme", func(g *igd) { g.location = "file:///etc/passwd" }, "not a URL of the router"},
		{"LOCATION with a user", func(g *igd) { g.location = strings.Replace(g.URL, "http://", "http://a:b@", 1) }, "not a URL of the router"},
		{"URLBase", func(g *igd) { g.base = elsewhere }, "not a URL of the router"},
		{"control URL", func(g *igd) { g.control = elsewhere + "/ctl" }, "not a URL of the router"},
		{"redirection", func(g *igd) { g.redirects = elsewhere }, "redirects"},
		{"endless description", func(g *igd) { g.padding = 2 * maxBody }, "description"},
	} {
		g := newIGD(t)
		g.mu.Lock()
		tt.router(g)
		g.mu.Unlock()
		finding.Go(func() { // all at once: each one waits for a better answer
			c, err := g.find(t, 12*time.Second)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: find returned %+v, %v; want an error that says %q", tt.name, c, err, tt.says)
			}
		})
	}
	finding.Wait()
}

// An answer of another device of the network is ignored.
func TestFindHearsTheRouterAlone(t *testing.T) {
	g := newIGD(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	other := nat.Route{Router: netip.MustParseAddr("127.0.0.9"), Local: loopback}
	if c, err := new(Finder).find(ctx, other, g.conn.LocalAddr().String()); err == nil || !strings.Contains(err.Error(), "no answer") {
		t.Errorf("find returned %v, %v; want no answer", c, err)
	}
}

func FuzzDescription(f *testing.F) {
	files, err := filepath.Glob("testdata/*.xml")
	if err != nil || len(files) == 0 {
		f.Fatalf("no descriptions in testdata: %v", err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	at, _ := url.Parse("http://192.168.1.1:5000/rootDesc.xml")
	r := nat.Route{Router: netip.MustParseAddr("192.168.1.1")}
	f.Fuzz(func(t *testing.T, b []byte) {
		root, err := parseDescription(bytes.NewReader(b), at)
		if err != nil {
			return
		}
		for _, target := range targets {
			for _, s := range root.Device.FindService(target) {
				u := s.ControlURL.URL
				if s.ControlURL.Ok && checkURL(&u, r) == nil && u.Hostname() != "192.168.1.1" {
					t.Errorf("%s is taken for a URL of the router", &u)
				}
			}
		}
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nST: upnp:rootdevice\r\nLOCATION: http://192.168.1.1:5000/rootDesc.xml\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if location, err := readAnswer(b); err == nil && location == "" {
			t.Error("an answer without LOCATION was taken")
		}
	})
}
