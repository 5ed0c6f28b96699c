package connect

import (
	"encoding/base64"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"strings"
	"testing"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const needAuth = "credentials are required and are missing or wrong"

func unauthorized(challenges ...string) string {
	for i, c := range challenges {
		challenges[i] = "Proxy-Authenticate: " + c
	}
	return refusal("407 Proxy Authentication Required", "http_request_denied", tunnel.NoAuth, needAuth, challenges...)
}

func TestAuth(t *testing.T) {
	auth := AnyOf{
		&BasicAuth{Verify: Passwords(map[string]string{"alice": "open:sesame", "bob": "", "zoë": "ключ", "eve\n": "x", "": "x"})},
		&Bearer{Verify: Tokens(map[string]string{"ci": "t0ken", "cd": "other"})},
	}
	denied := unauthorized(`Basic realm="culvert", charset="UTF-8"`, `Bearer realm="culvert"`)
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	alice := tunnel.Peer{ID: "alice", Method: "basic"}
	rows := []struct {
		name, credentials string
		want              tunnel.Peer
	}{
		{"user", basic("alice:open:sesame"), alice},
		{"user, scheme in another case", "bASIC  " + basic("alice:open:sesame")[6:], alice},
		{"user with an empty password", basic("bob:"), tunnel.Peer{ID: "bob", Method: "basic"}},
		{"user beyond ASCII", basic("zoë:ключ"), tunnel.Peer{ID: "zoë", Method: "basic"}},
		{"token", "Bearer t0ken", tunnel.Peer{ID: "ci", Method: "bearer"}},
		{"helper for a user", BasicCredentials("alice", "open:sesame"), alice},
		{"helper for a token", BearerCredentials("other"), tunnel.Peer{ID: "cd", Method: "bearer"}},
		{"none", "", tunnel.Peer{}},
		{"wrong password", basic("alice:sesame"), tunnel.Peer{}},
		{"unknown user", basic("mallory:open:sesame"), tunnel.Peer{}},
		{"the colon moved forward", basic("alic:eopen:sesame"), tunnel.Peer{}},
		{"the colon moved", basic("alice:open:sesame:"), tunnel.Peer{}},
		{"user in another case", basic("Alice:open:sesame"), tunnel.Peer{}},
		{"no colon", basic("alice"), tunnel.Peer{}},
		{"nothing inside", basic(""), tunnel.Peer{}},
		{"no user", basic(":x"), tunnel.Peer{}},
		{"not base64", "Basic alice:open:sesame", tunnel.Peer{}},
		{"not UTF-8", basic("alice\xff:open:sesame"), tunnel.Peer{}},
		{"line feed in the user", basic("eve\n:x"), tunnel.Peer{}},
		{"wrong token", "Bearer t0ke", tunnel.Peer{}},
		{"empty token", "Bearer ", tunnel.Peer{}},
		{"token as password", "Basic t0ken", tunnel.Peer{}},
		{"password as token", "Bearer " + basic("alice:open:sesame")[6:], tunnel.Peer{}},
		{"another scheme", "NTLM TlRMTVNTUAABAAAA", tunnel.Peer{}},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			r := &router{}
			g := serve(t, &Protocol{Auth: auth}, r)
			field := "Proxy-Authorization: " + row.credentials + "\r\n"
			if row.credentials == "" {
				field = ""
			}
			// A bad target and a loop are not looked at before the credentials.
			target := "svc.test:443"
			if row.want == (tunnel.Peer{}) {
				target = "nonsense"
			}
			got := exchange(t, g.addr, "CONNECT "+target+" HTTP/1.0\r\n"+field+"\r\nCONNECT svc.test:443 HTTP/1.0\r\n\r\n")
			asked, _ := r.asked()
			if row.want == (tunnel.Peer{}) {
				if got != denied {
					t.Errorf("got answer\n%s\nwant\n%s", got, denied)
				}
				tunneltest.WantReason(t, g.result(t), tunnel.NoAuth)
				if len(asked) != 0 {
					t.Errorf("got %d requests at the Handler, want none", len(asked))
				}
				return
			}
			if len(asked) != 1 || asked[0].Peer != row.want {
				t.Errorf("got requests %+v, want one by %+v; answer %q", asked, row.want, got)
			}
		})
	}
}

// What is not configured refuses everybody, whatever is sent.
func TestAuthFailsClosed(t *testing.T) {
	for _, auth := range []Authenticator{&BasicAuth{}, &Bearer{}, AnyOf{}, &BasicAuth{Verify: Passwords(nil)}, &Bearer{Verify: Tokens(nil)}} {
		for _, field := range []string{"Basic Og==", "Basic YTpi", "Bearer", "Bearer a", ""} {
			g := serve(t, &Protocol{Auth: auth}, &router{})
			got := exchange(t, g.addr, "CONNECT a.test:1 HTTP/1.0\r\nProxy-Authorization: "+field+"\r\n\r\n")
			if !strings.HasPrefix(got, "HTTP/1.1 407 ") {
				t.Errorf("%#v and %q: got answer %q, want a 407", auth, field, got)
			}
		}
	}
}

func TestTwoCredentials(t *testing.T) {
	g := serve(t, &Protocol{Auth: &Bearer{Verify: Tokens(map[string]string{"ci": "a"})}}, &router{})
	got := exchange(t, g.addr, "CONNECT a.test:1 HTTP/1.0\r\nProxy-Authorization: Bearer a\r\nproxy-authorization: Bearer a\r\n\r\n")
	if want := refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, "2 Proxy-Authorization fields"); got != want {
		t.Errorf("got answer %q, want %q", got, want)
	}
}

// Secrets are compared in constant time, by construction: what looks for one in a
// set is a loop without an end of its own, whose only calls are of crypto/subtle.
func TestComparisonsAreConstantTime(t *testing.T) {
	f, err := goparser.ParseFile(token.NewFileSet(), "auth.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	users := map[string]bool{}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if id, ok := call.Fun.(*ast.Ident); ok && id.Name == "find" {
				users[fn.Name.Name] = true
			}
			return true
		})
		if fn.Name.Name != "find" {
			continue
		}
		loops := 0
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.RangeStmt:
				loops++
			case *ast.IfStmt, *ast.SwitchStmt, *ast.BranchStmt:
				t.Errorf("find has a %T: how long it takes depends on what it finds", n)
			case *ast.CallExpr:
				if sel, ok := n.Fun.(*ast.SelectorExpr); !ok || fmt.Sprint(sel.X) != "subtle" {
					t.Error("find calls what is not of crypto/subtle")
				}
			case *ast.BinaryExpr:
				t.Errorf("find compares by %s", n.Op)
			}
			return true
		})
		if last, ok := fn.Body.List[len(fn.Body.List)-1].(*ast.ReturnStmt); !ok || len(fn.Body.List) != 3 || loops != 1 || last == nil {
			t.Error("find is not a start, a loop and a return")
		}
	}
	if !users["Passwords"] || !users["TokenDigests"] || len(users) != 2 {
		t.Errorf("find is called by %v, want Passwords and TokenDigests", users)
	}
}
