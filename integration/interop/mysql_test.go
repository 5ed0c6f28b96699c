//go:build unix

package interop

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
)

// Who may read the database of these tests, and what stands in it.
const (
	mysqlUser, mysqlPassword = "web", "through the gateway"
	mysqlQuery, mysqlAnswer  = "SELECT name FROM services", "orders"
)

// mariadb starts a MariaDB server with a database of one row. Its client is
// greeted before it has said anything.
func (w *world) mariadb(t *testing.T) (addr string) {
	t.Helper()
	dir := filepath.Join(w.dir, "mariadb")
	must(t, os.MkdirAll(dir, 0o700))
	common := []string{"--no-defaults", "--datadir=" + filepath.Join(dir, "data"), "--skip-name-resolve", "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=16M"}
	if os.Geteuid() == 0 {
		common = append(common, "--user=root")
	}
	if out, errs, code := command(t, "mariadb-install-db", append(common, "--skip-test-db", "--auth-root-authentication-method=normal")...); code != 0 {
		t.Fatalf("mariadb-install-db: exit code %d\n%s%s", code, out, errs)
	}
	first := w.write(t, "first.sql", fmt.Sprintf(`
CREATE DATABASE shop;
CREATE TABLE shop.services (name VARCHAR(20));
INSERT INTO shop.services VALUES ('%s');
CREATE USER %s@'%%' IDENTIFIED BY '%s';
GRANT SELECT ON shop.* TO %s@'%%';
`, mysqlAnswer, mysqlUser, mysqlPassword, mysqlUser))
	port := freePort(t)
	addr = net.JoinHostPort("127.0.0.1", port)
	start(t, "/usr/sbin/mariadbd", append(common, "--bind-address=127.0.0.1", "--port="+port, "--socket="+filepath.Join(dir, "socket"),
		"--pid-file="+filepath.Join(dir, "pid"), "--init-file="+first)...).listens(t, addr)
	return addr
}

// askMariaDB asks the database at addr by MariaDB's own client. A password that
// is wrong is refused by number.
func askMariaDB(t *testing.T, addr, password string) string {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	must(t, err)
	out, errs, _ := command(t, "mariadb", "--no-defaults", "--protocol=TCP", "--host="+host, "--port="+port, "--user="+mysqlUser, "--password="+password,
		"--batch", "--skip-column-names", "--execute="+mysqlQuery, "shop")
	return strings.TrimSpace(out + errs)
}

// askMySQL asks it by Go's usual client.
func askMySQL(t *testing.T, addr, password string) (answer string, err error) {
	t.Helper()
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd, cfg.Net, cfg.Addr, cfg.DBName = mysqlUser, password, "tcp", addr, "shop"
	cfg.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(cfg)
	must(t, err)
	db := sql.OpenDB(connector)
	defer db.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = db.QueryRowContext(ctx, mysqlQuery).Scan(&answer)
	return answer, err
}
