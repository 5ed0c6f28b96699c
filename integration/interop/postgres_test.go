//go:build unix

package interop

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"culvert.dev/internal/testca"
)

const (
	postgresName = "db.example.test"
	postgresUser = "web"
)

// postgres starts the PostgreSQL server of the system. See postgresOf.
func (w *world) postgres(t *testing.T) (addr string) {
	t.Helper()
	return w.postgresOf(t, postgresBin(t), false)
}

// postgres18 starts a server of version 18, which takes TLS without an SSLRequest.
func (w *world) postgres18(t *testing.T) (addr string) {
	t.Helper()
	// The checkout may be closed to the user that the server runs as.
	root := filepath.Join(w.dir, "postgres18")
	must(t, os.CopyFS(root, os.DirFS("../../bin/postgres18")))
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chmod(path, 0o755)
	}))
	return w.postgresOf(t, filepath.Join(root, "bin"), false)
}

// postgresOf starts a PostgreSQL server whose programs are in the folder bin. It takes TLS
// alone, and asks for the client certificate of postgresUser; or it is plain, and has no
// TLS. It may not run as root.
func (w *world) postgresOf(t *testing.T, bin string, plain bool) (addr string) {
	t.Helper()
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "db", testca.Options{SPIFFEID: "spiffe://example.test/db", DNSNames: []string{postgresName, "db.shop.example"}, Usage: testca.ServerOnly})
	dir := filepath.Join(w.dir, "postgres")
	must(t, os.MkdirAll(dir, 0o700))
	unprivileged := func(cmd *exec.Cmd) *exec.Cmd { return cmd }
	if os.Geteuid() == 0 {
		const nobody = 65534
		must(t, os.Chown(dir, nobody, nobody))
		for _, above := range []string{w.dir, filepath.Dir(w.dir)} {
			must(t, os.Chmod(above, 0o711))
		}
		unprivileged = func(cmd *exec.Cmd) *exec.Cmd {
			return exec.Command(look(t, "setpriv"), append([]string{"--reuid=65534", "--regid=65534", "--clear-groups", "--", cmd.Path}, cmd.Args[1:]...)...)
		}
	}
	data := filepath.Join(dir, "data")
	initdb := unprivileged(exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-U", postgresUser, "-A", "trust", "-N", "--locale=C"))
	if out, errs, code := runCmd(t, initdb); code != 0 {
		t.Fatalf("initdb: exit code %d\n%s%s", code, out, errs)
	}
	copyTo := func(name, from string) {
		b, err := os.ReadFile(from)
		must(t, err)
		to := filepath.Join(data, name)
		must(t, os.WriteFile(to, b, 0o600))
		info, err := os.Stat(data)
		must(t, err)
		owner := info.Sys().(*syscall.Stat_t)
		must(t, os.Chown(to, int(owner.Uid), int(owner.Gid)))
	}
	copyTo("server.crt", filepath.Join(w.dir, "db.crt"))
	copyTo("server.key", filepath.Join(w.dir, "db.key"))
	copyTo("ca.crt", w.ca)
	hba, ssl := "hostssl all all 127.0.0.1/32 cert\n", "on"
	if plain {
		hba, ssl = "host all all 127.0.0.1/32 trust\n", "off"
	}
	copyTo("pg_hba.conf", w.write(t, "pg_hba.conf", hba))
	port := freePort(t)
	addr = net.JoinHostPort("127.0.0.1", port)
	server := unprivileged(exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-c", "listen_addresses=127.0.0.1", "-c", "port="+port, "-c", "unix_socket_directories="+dir,
		"-c", "ssl="+ssl, "-c", "ssl_cert_file=server.crt", "-c", "ssl_key_file=server.key", "-c", "ssl_ca_file=ca.crt", "-c", "fsync=off"))
	startCmd(t, server).listens(t, addr)
	return addr
}

// postgresBin returns the folder of the server's programs, which Debian does not put
// into the path.
func postgresBin(t *testing.T) string {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	must(t, err)
	if len(found) > 0 {
		return filepath.Dir(found[len(found)-1])
	}
	return filepath.Dir(look(t, "initdb"))
}

// TestPostgres: psql and pgx reach a server by its name through the port that also
// serves TLS and CONNECT, from SSLRequest to a client certificate that the server
// verifies; and through a second gateway.
func TestPostgres(t *testing.T) {
	w := newWorld(t)
	server := w.postgres(t)
	inner := startGateway(t, "--config", w.write(t, "inner.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s"}]
admin: 127.0.0.1:%s
services:
  - {name: %s, ports: [5432], startTLS: postgres, endpoints: ["%s"]}
`, freePort(t), freePort(t), postgresName, server)))
	outer := startGateway(t, "--config", w.write(t, "outer.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s", protocols: [sni, postgres, connect]}]
admin: 127.0.0.1:%s
services:
  - {name: %s, ports: [5432], startTLS: postgres, endpoints: ["%s"]}
  - {name: off.example.test, startTLS: postgres, endpoints: ["%s"]}
`, freePort(t), freePort(t), postgresName, server, w.nginx(t))))
	through := startGateway(t, "--config", w.write(t, "through.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s", protocols: [postgres]}]
admin: 127.0.0.1:%s
services:
  - {name: %s, ports: [5432], endpoints: ["%s"]}
`, freePort(t), freePort(t), postgresName, inner.addr)))

	dsn := func(g *gateway, host, rest string) string {
		addr, port, err := net.SplitHostPort(g.addr)
		must(t, err)
		return fmt.Sprintf("host=%s hostaddr=%s port=%s user=%s dbname=postgres sslrootcert=%s sslcert=%s sslkey=%s connect_timeout=20 %s", host, addr, port, postgresUser, w.ca, w.cert, w.key, rest)
	}
	psql := func(dsn string) (string, string, int) {
		out, errs, code := command(t, "psql", "-X", "-A", "-t", "-c", "select ssl_client_dn_present from (select count(*) > 0 as ssl_client_dn_present from pg_stat_ssl where client_dn = '/CN=web' and pid = pg_backend_pid()) s", dsn)
		return strings.TrimSpace(out), errs, code
	}
	if out, errs, code := psql(dsn(outer, postgresName, "sslmode=verify-full")); out != "t" || code != 0 {
		t.Errorf("psql: exit code %d, got %q, %s, want t: the server saw the client's certificate", code, out, errs)
	}
	outer.line(t, "logged the tunnel", func(l line) bool {
		return l.Proto == "sni" && l.Service == postgresName && l.In > 0 // a server that is left without close_notify may reset
	})
	if out, errs, code := psql(dsn(outer, postgresName, "sslmode=disable")); code == 0 || !strings.Contains(errs, "SSL required") {
		t.Errorf("psql without TLS: exit code %d, got %q, %s, want to be told that SSL is required", code, out, errs)
	}
	if out, errs, code := psql(dsn(outer, "nobody.example.test", "sslmode=require")); code == 0 || !strings.Contains(errs, "unrecognized name") {
		t.Errorf("psql for a name that no service has: exit code %d, got %q, %s, want TLS's unrecognized name", code, out, errs)
	}
	if out, errs, code := psql(dsn(outer, "off.example.test", "sslmode=require")); code == 0 {
		t.Errorf("psql to a server that is no PostgreSQL: exit code %d, got %q, %s", code, out, errs)
	}
	outer.line(t, "said what the server answered", func(l line) bool {
		return l.Service == "off.example.test" && l.Reason == "dial-failed" && strings.Contains(l.Err, "SSLRequest")
	})

	for what, g := range map[string]*gateway{"through one gateway": outer, "through two": through} {
		host, port, err := net.SplitHostPort(g.addr)
		must(t, err)
		cfg, err := pgx.ParseConfig(fmt.Sprintf("host=%s port=%s user=%s dbname=postgres sslmode=verify-full sslrootcert=%s sslcert=%s sslkey=%s", postgresName, port, postgresUser, w.ca, w.cert, w.key))
		must(t, err)
		cfg.LookupFunc = func(context.Context, string) ([]string, error) { return []string{host}, nil }
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err != nil {
			t.Errorf("pgx %s: %v", what, err)
			continue
		}
		var got string
		if err := conn.QueryRow(ctx, postgresWhoami).Scan(&got); err != nil || got != "/CN=web" {
			t.Errorf("pgx %s: got client %q, %v; want /CN=web", what, got, err)
		}
		rows, err := conn.Query(ctx, "select repeat('x', 1000) from generate_series(1, 10000)")
		must(t, err)
		n := 0
		for rows.Next() {
			n++
		}
		if rows.Err() != nil || n != 10000 {
			t.Errorf("pgx %s: %d rows, %v; want 10000", what, n, rows.Err())
		}
		_ = conn.Close(ctx)
	}
}

// The name of a client, as the server has seen it in its certificate.
const postgresWhoami = "select client_dn from pg_stat_ssl where pid = pg_backend_pid()"

// TestPostgresJDBC: PostgreSQL's driver for Java, with a client certificate.
func TestPostgresJDBC(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s", protocols: [sni, postgres]}]
admin: 127.0.0.1:%s
services:
  - {name: %s, startTLS: postgres, endpoints: ["%s"]}
`, freePort(t), freePort(t), postgresName, w.postgres(t))))
	key := filepath.Join(w.dir, "web.pk8")
	if out, errs, code := command(t, "openssl", "pkcs8", "-topk8", "-nocrypt", "-in", w.key, "-outform", "DER", "-out", key); code != 0 {
		t.Fatalf("openssl pkcs8: exit code %d\n%s%s", code, out, errs)
	}
	host, port, err := net.SplitHostPort(g.addr)
	must(t, err)
	url := fmt.Sprintf("jdbc:postgresql://%s:%s/postgres?user=%s&sslmode=verify-full&sslrootcert=%s&sslcert=%s&sslkey=%s", postgresName, port, postgresUser, w.ca, w.cert, key)
	out, errs, code := command(t, "java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-Djdk.net.hosts.file="+w.write(t, "hosts", host+" "+postgresName+"\n"),
		"-cp", "/usr/share/java/postgresql.jar", "testdata/Query.java", url, postgresWhoami)
	if strings.TrimSpace(out) != "/CN=web" || code != 0 {
		t.Errorf("exit code %d, got %q, want /CN=web\n%s", code, out, errs)
	}
}

// TestPostgresDirectTLS: since PostgreSQL 17 clients may begin with TLS, whose ALPN says
// what follows. Such a client passes like any other TLS, also at a listener without the
// protocol postgres, and where the service has startTLS for the sake of older clients.
func TestPostgresDirectTLS(t *testing.T) {
	w := newWorld(t)
	server := w.postgres18(t)
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%s", protocols: [sni, postgres]}
admin: 127.0.0.1:%s
services:
  - {name: other.example.test, endpoints: ["127.0.0.1:1"]}
  - {name: other.example.test, match: {alpn: [postgresql]}, endpoints: ["%s"]}
  - {name: %s, startTLS: postgres, endpoints: ["%[3]s"]}
`, freePort(t), freePort(t), server, postgresName)))
	plain := startGateway(t, "--listen", "127.0.0.1:0", "--route", postgresName+"="+server)
	for _, tt := range []struct {
		name    string
		gateway *gateway
		host    string
		options string
	}{
		{"direct", plain, postgresName, "sslmode=verify-full sslnegotiation=direct"},
		{"direct, to a service with startTLS", g, postgresName, "sslmode=verify-full sslnegotiation=direct"},
		{"direct, found by its ALPN", g, "other.example.test", "sslmode=verify-ca sslnegotiation=direct"},
		{"by an SSLRequest", g, postgresName, "sslmode=verify-full sslnegotiation=postgres"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			addr, port, err := net.SplitHostPort(tt.gateway.addr)
			must(t, err)
			dsn := fmt.Sprintf("user=%s dbname=postgres sslrootcert=%s sslcert=%s sslkey=%s connect_timeout=20 %s", postgresUser, w.ca, w.cert, w.key, tt.options)
			out, errs, code := command(t, "../../bin/postgres18/psql", "-X", "-A", "-t", "-c", postgresWhoami, fmt.Sprintf("host=%s hostaddr=%s port=%s %s", tt.host, addr, port, dsn))
			if strings.TrimSpace(out) != "/CN=web" || code != 0 {
				t.Errorf("libpq 18: exit code %d, got %q, %s, want /CN=web", code, out, errs)
			}
			cfg, err := pgx.ParseConfig(fmt.Sprintf("host=%s port=%s %s", tt.host, port, dsn))
			must(t, err)
			cfg.LookupFunc = func(context.Context, string) ([]string, error) { return []string{addr}, nil }
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			conn, err := pgx.ConnectConfig(ctx, cfg)
			if err != nil {
				t.Fatalf("pgx: %v", err)
			}
			defer conn.Close(ctx)
			var got string
			if err := conn.QueryRow(ctx, postgresWhoami).Scan(&got); err != nil || got != "/CN=web" {
				t.Errorf("pgx: got client %q, %v; want /CN=web", got, err)
			}
		})
	}
}
